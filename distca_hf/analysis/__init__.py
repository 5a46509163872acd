"""The command `distca plan`: balance, speed and memory of a training, estimated from document lengths alone.

| file | from | to |
|---|---|---|
| commands, options, command | the command line | text, picture or JSON; and the report of `distca env` |
| lengths | a file or a dataset | document lengths |
| find_model | the name of a model, or its config.json | heads, bytes and numbers of weights |
| request | ranks, tokens and the model, with a table of public ones | plans of micro-steps, as training makes them |
| first_step | the first optimizer step | its plan, in numbers |
| epoch | document lengths and the seed | the micro-batches of training; their balance, as packed and as planned |
| estimates | the same training as `simulate` sees it | speed and memory |
| answer | all of these | one answer, with other numbers of tokens per rank |
| print_answer, pictures | the answer | terminal and picture |

Training imports nothing from here.
"""
