"""From text, JSONL, parquet or hub datasets to packed rows of token ids; `prepare_data.py` is the command line.

pipeline.py runs the others in turn:

input_files.py, sources.py   list an input's files, read its records
tokenising.py                tokenises a record; chats.py renders chats, spans.py finds the tokens of answers
corpus.py                    tokenises a source in several processes and keeps its tokens on disk
sampling.py, packing.py      hold out documents and upsample long ones; cut and pack documents into full rows
planning.py                  decides with these which rows each split has
retrieval.py, facts.py       write facts and questions into rows
writing.py, report.py        save the rows, say what came out
folders.py                   make the output aside and swap it in
arguments.py, settings.py    the flags; what decides the rows, and the digests that recognise it
"""
