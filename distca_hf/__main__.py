"""`python -m distca_hf`: the `distca` command, if its script is not on the PATH."""

from distca_hf.cli import main


if __name__ == "__main__":
    main()
