"""What `distca report` shows: a run, from traces that training wrote, or an answer of another command, as one page.

| file | job |
|---|---|
| `run_report` | finds what a path holds, and the file that reads it; writes a page of templates in `page/`, or JSON |
| `run_folder`, `trace_index` | reads a folder of traces, step after step |
| `answers` | reads the JSON of `distca plan` and `distca simulate` |
| `figures` | all that a page shows, whatever it was read from |
| `straggler` | the rank, or the attention server, that others wait for, and why |
| `predictions` | seconds of every rank from the measured profile of its GPU |
| `small_enough` | chooses figures to show where there are too many for a page |

A new kind of input is a function in `answers`, and its command in `run_report`.
"""
