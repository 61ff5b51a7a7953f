"""What a person runs: `python -m fluxlike TOOL`. Each tool is a module with `main(argv) -> exit status`."""
