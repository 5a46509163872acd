"""The commands `distca plan`, `check`, `profile`, `simulate`, `report` and `explain`. Training imports none of them.

`docs/design.md` lists the files of each command.
"""
