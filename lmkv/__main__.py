"""``python -m lmkv`` is the ``lmkv`` command."""

from lmkv.cli import main

if __name__ == "__main__":
    main()
