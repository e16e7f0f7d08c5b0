"""From text to rows of tokens: sources → tokenizer → shards on disk → rows. Knows no model.

sources and files read documents, tokenizer turns them into ids, prepare writes shards in parallel, loader serves rows.
"""
