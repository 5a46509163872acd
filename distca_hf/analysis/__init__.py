"""The commands `distca plan`, `check`, `profile`, `simulate`, `report` and `explain`. Training imports nothing of it.

`docs/design.md` lists the files of each command.
"""
