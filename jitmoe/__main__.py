"""`python -m jitmoe` and the `jitmoe` script."""

from jitmoe.cli import app


def main() -> None:
    app(prog_name="jitmoe")


if __name__ == "__main__":
    main()
