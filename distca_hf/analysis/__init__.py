"""The commands `distca plan`, `check`, `profile`, `simulate`, `report` and `explain`. Training imports none of them.

`docs/design.md` lists the files of each command. Wrong input is a ConfigError, a PackingError (lengths, and plans of
them) or a ReportError, and the command prints it as one line. So most docstrings here do not list errors.
"""
