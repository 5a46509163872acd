"""What `distca report` shows: a run, from traces that training wrote, or an answer of another command, as one page.

A new kind of input is a function in `estimates`, and its command in `run_report`.
"""
