from examples.service.server import main

if __name__ == "__main__":
    main()
