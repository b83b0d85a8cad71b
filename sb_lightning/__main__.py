"""`python -m sb_lightning` is `sb`."""

from sb_lightning.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
