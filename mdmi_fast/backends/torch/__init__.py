"""The "torch" backend: plain torch, on any device, in tiles that keep temporaries small."""
