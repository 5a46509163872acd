"""train.py MODEL DOCUMENTS: a model's folder or name, and a .jsonl file with a "text" on every line."""

import sys

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import distca_hf  #!


name, documents = sys.argv[1:]
gpu = torch.cuda.is_available()  # most CPUs are slow in bf16
args = TrainingArguments("output", learning_rate=1e-5, bf16=gpu, logging_steps=1, use_cpu=not gpu)
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)  # pads, and makes labels
model = AutoModelForCausalLM.from_pretrained(name)


def tokenise(rows):  # few tokenizers add the end by themselves
    ids = tokenizer(rows["text"])["input_ids"]
    return {"input_ids": [[*document, tokenizer.eos_token_id] for document in ids]}


with args.main_process_first():  # the other ranks read the cache that the first has written
    texts = load_dataset("json", data_files=documents, split="train")
    tokenised = texts.map(tokenise, batched=True, remove_columns=texts.column_names)
data = tokenised.train_test_split(test_size=0.05, seed=0)

trainer = Trainer(model, args, collator, data["train"], data["test"], processing_class=tokenizer)
distca_hf.DistCAPlugin().attach(trainer)  #!
trainer.train()
trainer.log_metrics("eval", trainer.evaluate())
trainer.save_model()  # an ordinary model, with its tokenizer
