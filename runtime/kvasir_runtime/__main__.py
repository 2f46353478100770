"""`python -m kvasir_runtime`, for where the command is not installed."""

from kvasir_runtime.cli import main

if __name__ == "__main__":  # the engine core is spawned and imports this module anew
    main()
