"""The commands `distca plan`, `check`, `profile`, `simulate`, `report` and `explain`. Training imports none of them.

Wrong input is a ConfigError, a PackingError (lengths, and plans of them) or a ReportError, and the command prints it
as one line. So most docstrings here do not list errors.
"""
