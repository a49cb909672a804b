"""From text, JSONL, parquet or hub datasets to packed rows of token ids; `prepare_data.py` is the command line.

input_files.py lists files, sources.py reads records, documents.py tokenises them (chats.py renders chats, spans.py
finds the answers' tokens, workers.py runs it in several processes), token_store.py keeps the tokens on disk,
sampling.py splits off validation documents and upsamples long ones, packing.py plans rows, retrieval.py writes facts
and questions into them, rows.py saves them, report.py says what came out, folders.py tells own folders from others'
and swaps results in, and pipeline.py runs these in turn.
"""
