"""Balanced training in ms-swift: a file for its option `--external_plugins`. Nothing else of the command changes.

    NPROC_PER_NODE=8 swift sft --model MODEL --dataset DATASET --external_plugins "$(distca examples ms_swift_plugin)"

Every Trainer of the process is attached for as long as it trains. Packing and batches stay ms-swift's. Settings are
variables, such as DISTCA_METRICS=all.
"""

import distca_hf


distca_hf.attach_every_trainer()
