try:
    from examples.service.server import main
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install 'mdmi-fast[service,metrics,cache]'") from None

if __name__ == "__main__":
    main()
