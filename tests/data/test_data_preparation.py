"""Parts of the data tool: reading, tokenising, storing, sampling, packing."""

import bz2
import gzip
import json
import lzma
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from tokenizer_styles import tokenizer_of_style

from easy_context.data.preparation.input_files import describe_files, files_left_out, list_files
from easy_context.data.preparation.packing import Segment, pack
from easy_context.data.preparation.sampling import choose_validation, upsample_long_documents
from easy_context.data.preparation.sources import Record, Source, _batch_rows, parse_source, read_source
from easy_context.data.preparation.token_store import TokenStore, fill_token_store
from easy_context.data.preparation.tokenising import DocumentTokenizer, TokenisedDocument
from easy_context.data.preparation.uses import count_uses, first_tokens
from easy_context.data.preparation.workers import _batches, tokenise


def read(path, document_start=None):
    return list(read_source(Source("s", str(path)), document_start))


# --- sources


def test_reads_every_file_type_alike(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("first", "zweiter ü")).encode()
    for name, opener in (
        ("a.jsonl", open),
        ("b.jsonl.gz", gzip.open),
        ("c.json.xz", lzma.open),
        ("d.ndjson.bz2", bz2.open),
    ):
        with opener(tmp_path / name, "wb") as file:
            file.write(lines)
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["first", "zweiter ü"]}), tmp_path / "e.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert [record.data["text"] for record in read(path)] == ["first", "zweiter ü"], path
    assert len(read(tmp_path)) == 10


def test_reads_saved_datasets(tmp_path):
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_dict({"text": ["one", "two"]})
    dataset.save_to_disk(tmp_path / "rows")
    assert [record.data["text"] for record in read(tmp_path / "rows")] == ["one", "two"]
    DatasetDict(train=dataset).save_to_disk(tmp_path / "splits")
    assert len(read(tmp_path / "splits" / "train")) == 2


def test_text_file_is_one_document_unless_a_start_is_given(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes("\ufeffPreface.\r\nCHAPTER 1\r\nA.\r\nCHAPTER 2\r\nB.".encode())
    assert [record.data["text"] for record in read(path)] == ["Preface.\nCHAPTER 1\nA.\nCHAPTER 2\nB."]
    parts = read(path, "^CHAPTER")
    assert [record.data["text"] for record in parts] == ["Preface.\n", "CHAPTER 1\nA.\n", "CHAPTER 2\nB."]
    assert [record.location for record in parts] == [f"{path}:{line}" for line in (1, 2, 4)]


def test_bad_lines_are_named(tmp_path):
    path = tmp_path / "mixed.jsonl"
    deep = b"[" * 100_000 + b"]" * 100_000
    path.write_bytes(b'{"text": "good"}\n{"text": \n\n[1]\n\xff\xfe\n{"text": %s}\n' % deep)
    records = read(path)
    assert [record.location for record in records] == [f"{path}:{line}" for line in (1, 2, 4, 5, 6)]
    assert records[0].problem is None
    assert "not JSON" in records[1].problem
    assert "list" in records[2].problem
    assert "not JSON" in records[3].problem
    assert records[4].problem == "nested too deep"


def parquet_with_a_bad_string(path):
    """Three rows, of which the second holds half a surrogate pair, as some writers let it pass."""
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.array([b"first", b"a\xed\xa0\x80b", b"third"]).view(pyarrow.string())
    table = pyarrow.table({"text": text, "other": [1, 2, 3]})
    pyarrow.parquet.write_table(table, path)
    return table


def test_a_bad_string_in_a_table_is_named_and_spoils_no_other_row(tmp_path):
    from datasets import Dataset

    table = parquet_with_a_bad_string(tmp_path / "a.parquet")
    Dataset(table).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "a.parquet", tmp_path / "saved"):
        first, bad, third = read(path)
        assert [first.data["text"], third.data["text"]] == ["first", "third"]
        assert bad.location == f"{path}:2"
        assert bad.problem.startswith("cannot be read: 'utf-8' codec")


def test_only_the_fields_asked_for_are_read_of_a_table(tmp_path):
    import pyarrow.parquet
    from datasets import Dataset

    # Not even readable: what is not asked for is not looked at.
    bad = parquet_with_a_bad_string(tmp_path / "a.parquet")["text"]
    messages = [[{"role": "user", "content": "x"}]] * 3
    table = pyarrow.table({"bad": bad, "text": ["1", "2", "3"], "messages": messages})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    Dataset(table).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "a.parquet", tmp_path / "saved"):
        records = list(read_source(Source("s", str(path)), fields=("text", "messages")))
        assert [r.data for r in records] == [{"bad": None, "text": i, "messages": messages[0]} for i in "123"]
        unnamed = list(read_source(Source("s", str(path)), fields=("body",)))
        assert [record.location for record in unnamed] == [f"{path}:{row}" for row in (1, 2, 3)]


@pytest.mark.parametrize(("characters", "rows"), [(10, 256), (200_000, 83), (20_000_000, 1)])
def test_rows_of_parquet_are_read_few_at_a_time_where_they_are_long(tmp_path, characters, rows):
    import pyarrow
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    texts = [rng.bytes(characters // 2).hex() for _ in range(3)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "other": texts}), tmp_path / "a.parquet")
    metadata = pyarrow.parquet.read_metadata(tmp_path / "a.parquet")
    assert _batch_rows(metadata, ["text"]) == rows
    assert len(read(tmp_path / "a.parquet")) == 3


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("nothing_there.txt", FileNotFoundError, "does not exist"),
        ("table.xlsx", ValueError, "unsupported file type"),
        ("empty", ValueError, "no usable file"),
        ("splits", ValueError, "holds several splits; name the folder of one"),
    ],
)
def test_unusable_sources_are_refused(tmp_path, text, error, message):
    (tmp_path / "table.xlsx").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(error, match=message):
        parse_source(str(tmp_path / text))


def test_what_is_not_read_of_a_folder_is_counted_by_kind(tmp_path):
    from datasets import Dataset

    names = ("a.txt", "sub/b.jsonl.gz", "README.md", "sub/readme.md", "SOURCES.md", "x.pdf", "sub/Y.PDF", "z.csv.gz")
    for name in (*names, ".DS_Store", "sub/.DS_Store", "Makefile", "report.json", "state.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "state.json").rename(tmp_path / "sub" / "state.json")  # alone it is no saved dataset
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nothing")
    (tmp_path / "linked").symlink_to(tmp_path / "sub")
    Dataset.from_dict({"text": ["one"]}).save_to_disk(tmp_path / "saved")
    files = list_files(tmp_path)
    read_names = ["a.txt", "report.json", "sub/b.jsonl.gz", "sub/state.json"]
    assert [file.relative_to(tmp_path).as_posix() for file in files] == read_names
    left_out = files_left_out(tmp_path)
    assert left_out == {
        **{".pdf": 2, ".DS_Store": 2, ".csv.gz": 1, "without a suffix": 1, "broken links": 1, "links to folders": 1},
        **{"README.md": 1, "readme.md": 1, "SOURCES.md": 1, "of saved datasets": 3},
    }
    every_file = [path for path in tmp_path.rglob("*") if path.is_symlink() or not path.is_dir()]
    assert len(files) + sum(left_out.values()) == len(every_file)
    assert files_left_out(tmp_path / "saved") == files_left_out(tmp_path / "a.txt") == {}
    for path in files:
        path.unlink()
    with pytest.raises(ValueError, match=r"no usable file below .* \(left out: of saved datasets 3, .*\.pdf 2"):
        list_files(tmp_path)


def test_many_kinds_are_named_in_short():
    assert describe_files({f".{i:02}": 20 - i for i in range(20)}).endswith(".11 9, others 36")


def test_a_text_of_another_encoding_is_a_bad_record(tmp_path):
    (tmp_path / "a.txt").write_bytes("Ça va".encode("latin-1"))
    (record,) = read(tmp_path)
    assert (record.location, record.data) == (f"{tmp_path / 'a.txt'}:1", None)
    assert record.problem.startswith("not UTF-8")


@pytest.mark.parametrize("text", ["", " ", "a=", "hub:", "a=hub:", "hub::c", "hub:a:b:c:d", "hub:a b"])
def test_sources_without_a_place_are_refused(text):
    with pytest.raises(ValueError, match=f"--validation-input {text!r}: (no path in it; )?give "):
        parse_source(text, "--validation-input")


@pytest.mark.parametrize(
    "name", ["a.txt.gz", "a.jsonl.gz", "a.txt.xz", "a.jsonl.bz2", "a.parquet", "cut.txt.gz", "cut.txt.xz"]
)
def test_damaged_files_are_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"no such format")
    if name.startswith("cut"):
        compress = gzip.compress if name.endswith("gz") else lzma.compress
        path.write_bytes(compress(b"text " * 1000)[:-10])
    with pytest.raises(ValueError, match=f"--input: {path} cannot be read .*; repair it or leave it out"):
        read(path)


def test_damaged_saved_dataset_is_named(tmp_path):
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ValueError, match=f"--input: {tmp_path} cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"records": 1}'])
def test_damaged_shard_is_named(tmp_path, content):
    (tmp_path / "shard-00000").mkdir()
    (tmp_path / "shard-00000" / "meta.json").write_text(content)
    with pytest.raises(ValueError, match="--work-dir: .*shard-00000 is damaged .*; delete "):
        fill_token_store(tmp_path, [], iter)


def test_source_names(tmp_path):
    path = tmp_path / "my books.txt.gz"
    path.touch()
    assert parse_source(str(path)).name == "my-books"
    assert parse_source(f"novels={path}") == Source("novels", str(path))
    assert parse_source("hub:a/b:c:train") == Source("a-b-c-train", "hub:a/b:c:train")
    strange = tmp_path / "a=b.txt"
    strange.touch()
    assert parse_source(str(strange)).location == str(strange)


# --- documents


@pytest.fixture(scope="module", params=["llama2", "mistral", "llama3", "smollm2", "bytes"])
def tokenizer(request):
    return tokenizer_of_style(request.param)


SEPARATOR = 5


def test_document_has_bos_as_the_tokenizer_wants_and_a_separator(tokenizer):
    text = "Emma Woodhouse, handsome and clever.\n\nShe was 21."
    document = DocumentTokenizer(tokenizer, SEPARATOR)(Record("here", {"text": text}))
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id is not None else []
    assert document.ids.tolist() == [*bos, *plain, SEPARATOR]
    assert document.learn is None


def test_only_the_response_is_learned(tokenizer):
    make = DocumentTokenizer(tokenizer, SEPARATOR)
    document = make(Record("here", {"prompt": "How old is Emma? ", "response": "She is 21."}))
    learned = document.ids[document.learn].tolist()
    assert tokenizer.decode(learned[:-1]) == "She is 21." and learned[-1] == SEPARATOR
    assert len(document.learn) == len(document.ids)


def test_only_assistant_turns_are_learned():
    tokenizer = tokenizer_of_style("smollm2")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who is Emma?"},
        {"role": "assistant", "content": "A heroine."},
        {"role": "user", "content": "Whose?"},
        {"role": "assistant", "content": "Austen's."},
        {"role": "user", "content": "This is never answered."},
    ]
    document = DocumentTokenizer(tokenizer, 0)(Record("here", {"messages": messages}))
    # The turn's own end is learned, the separator behind it is not.
    assert tokenizer.decode(document.ids[document.learn]) == "A heroine.<|im_end|>\nAusten's.<|im_end|>\n"
    assert document.ids[-1] == 0
    whole = tokenizer.apply_chat_template(messages[:5], tokenize=False)
    assert tokenizer.decode(document.ids[:-1]) == whole


def test_a_chat_template_with_bos_gives_one_bos():
    tokenizer = tokenizer_of_style("llama3")
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Emma."}]
    document = DocumentTokenizer(tokenizer, SEPARATOR)(Record("here", {"messages": messages}))
    assert (document.ids == tokenizer.bos_token_id).sum() == 1


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"body": "x"}, r"no field 'text' \(fields: body\)"),
        ({"text": 3}, "is int, not text"),
        ({"text": "  "}, "is empty"),
        ({"prompt": "x"}, "no field 'response'"),
        ({"messages": []}, "list of"),
        ({"messages": [{"content": "x"}]}, "no role"),
        ({"messages": [{"role": "assistant", "content": None}]}, "not text"),
        ({"messages": [{"role": "user", "content": "x"}]}, "nothing to learn"),
        ({"text": "a\ud800b"}, "not Unicode: .*surrogate"),
        ({"prompt": "a", "response": "a\ud800b"}, "not Unicode: .*surrogate"),
        ({"messages": [{"role": r, "content": "a\ud800b"} for r in ("user", "assistant")]}, "not Unicode: .*surrogate"),
        ({"prompt": None, "response": None}, r"no field 'text' \(fields: prompt, response\)"),
        ({"prompt": None, "response": "x"}, "field 'prompt' is null, not text"),
        ({"text": "x", "prompt": "y"}, "has 'text' and also 'prompt'; --text-field text takes 'text', and where that"),
        ({"text": "x", "prompt": "y", "response": "z"}, "has 'text' and also 'prompt' and 'response'; --text-field"),
    ],
)
def test_bad_records_say_what_is_wrong(data, problem):
    document = DocumentTokenizer(tokenizer_of_style("smollm2"), 0)(Record("file:7", data))
    assert document.ids is None
    assert document.location == "file:7"
    assert re.search(problem, document.problem)


def test_what_a_tokenizer_raises_makes_a_bad_record():
    make = DocumentTokenizer(tokenizer_of_style("smollm2"), 0)
    make.encoder.tokenizer = lambda *_, **__: {}["input_ids"]
    document = make(Record("file:7", {"text": "x"}))
    assert (document.location, document.problem) == ("file:7", "KeyError: 'input_ids'")


@pytest.mark.parametrize(
    ("text_field", "data", "learned"),
    [
        ("text", {"text": "a b", "prompt": "c", "response": "d"}, "a b"),
        ("text", {"text": "a b", "prompt": "c"}, "a b"),
        ("text", {"text": "a b", "messages": [{"role": "assistant", "content": "d"}]}, "a b"),
        ("body", {"text": "a b", "prompt": "c", "response": "d"}, "d"),
        ("text", {"text": None, "prompt": "c", "response": "d"}, "d"),
        (None, {"text": "a b", "prompt": None, "response": None, "messages": None}, "a b"),
        (None, {"text": " ", "prompt": "c", "response": "d"}, "d"),
        (None, {"prompt": "", "response": "d"}, "d"),
    ],
)
def test_which_fields_are_taken(text_field, data, learned):
    tokenizer = tokenizer_of_style("smollm2")
    document = DocumentTokenizer(tokenizer, 0, text_field)(Record("file:7", data))
    assert document.problem is None
    ids = document.ids if document.learn is None else document.ids[document.learn]
    assert tokenizer.decode(ids[:-1]) == learned
    assert ids[-1] == 0


def test_workers_change_nothing():
    make = DocumentTokenizer(tokenizer_of_style("smollm2"), 0)
    records = [Record(f"f:{i}", {"text": f"number {i} " * (i % 50 + 1)}) for i in range(700)]
    alone = list(tokenise(iter(records), make, workers=1))
    together = list(tokenise(iter(records), make, workers=2))
    assert [document.location for document in together] == [record.location for record in records]
    assert all((a.ids == b.ids).all() for a, b in zip(alone, together, strict=True))


def test_a_record_nested_too_deep_for_a_worker_is_tokenised():
    data = {"text": "a b", "more": json.loads("[" * 900 + "]" * 900)}
    make = DocumentTokenizer(tokenizer_of_style("smollm2"), 0)
    (document,) = tokenise([Record("f:1", data)], make, workers=2)
    assert document.ids.tolist() == make(Record("f:1", {"text": "a b"})).ids.tolist()


@pytest.mark.parametrize(
    "data",
    [
        {"text": "x" * 100_000},
        {"messages": [{"role": "user", "content": "x" * 60_000}, {"role": "assistant", "content": "x" * 40_000}]},
        {"text": "x", "more": [["x" * 50_000], {"x": {"y": "x" * 50_000}}]},
    ],
)
def test_batches_are_bounded_by_all_text(data):
    """A batch ends with the record that makes it half a million characters."""
    batches = _batches(Record(str(i), data) for i in range(20))
    assert [len(batch) for batch in batches] == [6, 6, 6, 2]


def test_reads_no_further_than_it_must():
    """With two workers at most four batches of 256 records wait: memory stays bounded."""
    taken = 0

    def records():
        nonlocal taken
        for i in range(100_000):
            taken += 1
            yield Record(f"f:{i}", {"text": "x"})

    documents = tokenise(records(), DocumentTokenizer(tokenizer_of_style("bytes"), 0), workers=2)
    next(documents)
    documents.close()
    assert taken <= 5 * 256


# --- token store


def documents_of(records, lengths):
    for record in records:
        length = lengths[int(record.location)]
        learn = np.arange(length) % 2 == 0 if length % 3 == 0 else None
        yield (
            TokenisedDocument(record.location, np.arange(length, dtype=np.uint32), learn)
            if length
            else TokenisedDocument(record.location, problem="empty")
        )


def test_store_returns_what_was_put_in(tmp_path, monkeypatch):
    monkeypatch.setattr("easy_context.data.preparation.token_store.FIRST_SHARD_TOKENS", 50)
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 40, 60)
    records = [Record(str(i), {}) for i in range(len(lengths))]
    store = fill_token_store(tmp_path / "s", records, partial(documents_of, lengths=lengths))
    assert store.lengths.tolist() == lengths[lengths > 0].tolist()
    assert store.problems == (lengths == 0).sum() == len(list(store.bad_records()))
    assert store.has_prompts
    for document, length in enumerate(store.lengths):
        ids, learn = store.read(document, 1, int(length))
        assert ids.tolist() == list(range(1, length))
        assert learn.tolist() == [length % 3 != 0 or i % 2 == 0 for i in range(1, length)]


def test_store_goes_on_after_an_interruption(tmp_path, monkeypatch):
    monkeypatch.setattr("easy_context.data.preparation.token_store.FIRST_SHARD_TOKENS", 50)
    lengths = np.full(40, 20)
    records = [Record(str(i), {}) for i in range(40)]
    tokenised = []

    def fail_at_25(documents):
        for number, document in enumerate(documents_of(documents, lengths)):
            if number == 25:
                raise KeyboardInterrupt
            yield document

    with pytest.raises(KeyboardInterrupt):
        fill_token_store(tmp_path / "s", records, fail_at_25)
    fill_token_store(
        tmp_path / "s",
        records,
        partial(documents_of, lengths=lengths),
        on_document=lambda d: tokenised.append(d.location),
    )
    assert tokenised == [str(i) for i in range(24, 40)]  # eight whole shards of three documents were kept
    whole = fill_token_store(tmp_path / "t", records, partial(documents_of, lengths=lengths))
    again = TokenStore(tmp_path / "s")
    assert again.lengths.tolist() == whole.lengths.tolist()
    assert all((again.read(i, 0, 20)[0] == whole.read(i, 0, 20)[0]).all() for i in range(40))


def test_strict_names_the_line(tmp_path):
    records = [Record("0", {}), Record("1", {})]
    with pytest.raises(ValueError, match="--strict: bad record at 1: empty"):
        fill_token_store(tmp_path / "s", records, partial(documents_of, lengths=[5, 0]), strict=True)


@pytest.mark.parametrize("interrupted", [False, True])
def test_strict_sees_what_an_earlier_run_only_counted(tmp_path, monkeypatch, interrupted):
    monkeypatch.setattr("easy_context.data.preparation.token_store.SHARD_RECORDS", 2)
    records = [Record(str(i), {}) for i in range(9)]
    documents = partial(documents_of, lengths=[5, 5, 5, 0, 5, 0, 5, 5, 5])
    if interrupted:

        def stop(document):
            if document.location == "7":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fill_token_store(tmp_path / "s", records, documents, on_document=stop)
    else:
        fill_token_store(tmp_path / "s", records, documents)
    with pytest.raises(ValueError, match="--strict: bad record at 3: empty"):
        fill_token_store(tmp_path / "s", records, documents, strict=True)


def test_shards_grow_with_what_is_done(tmp_path, monkeypatch):
    """So an interruption costs little, and many tokens make few files."""
    monkeypatch.setattr("easy_context.data.preparation.token_store.FIRST_SHARD_TOKENS", 100)
    monkeypatch.setattr("easy_context.data.preparation.token_store.MOST_SHARD_TOKENS", 400)
    records = [Record(str(i), {}) for i in range(1000)]
    fill_token_store(tmp_path / "s", records, partial(documents_of, lengths=[10] * 1000))
    sizes = [int(np.load(shard / "lengths.npy").sum()) for shard in sorted((tmp_path / "s").glob("shard-*"))]
    assert sizes[:8] == [100] * 8
    assert all(a <= b for a, b in zip(sizes, sizes[1:-1], strict=False))
    assert all(size < 10 + max(sum(sizes[:i]) / 8, 100) for i, size in enumerate(sizes))
    assert max(sizes) == 400
    assert len(sizes) == 37


def test_many_shards_keep_no_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr("easy_context.data.preparation.token_store.SHARD_RECORDS", 1)
    lengths = [3 + i % 5 for i in range(200)]
    records = [Record(str(i), {}) for i in range(200)]
    store = fill_token_store(tmp_path / "s", records, partial(documents_of, lengths=lengths))
    before = psutil.Process().num_fds()
    parts = [store.read(document, 0, lengths[document]) for document in np.random.default_rng(0).permutation(200)]
    assert psutil.Process().num_fds() <= before
    assert all(ids.tolist() == list(range(len(ids))) for ids, _ in parts)


# --- sampling


@pytest.mark.parametrize("seed", range(5))
def test_upsampling_keeps_the_tokens_of_the_source(seed):
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(7, 1.2, 3000)).astype(int) + 1
    uses = upsample_long_documents(lengths, 4096, 5.0, rng)
    long = lengths >= 4096
    before = lengths[long].sum() / lengths[~long].sum()
    after = (uses * lengths)[long].sum() / (uses * lengths)[~long].sum()
    assert after / before == pytest.approx(5.0, rel=0.05)
    assert (uses * lengths).sum() == pytest.approx(lengths.sum(), rel=0.02)


LENGTHS = {
    "few long": np.array([10_000, *[100] * 40]),
    "one of each": np.array([5000, 3000]),
    "many": np.exp(np.random.default_rng(0).normal(7, 1.2, 400)).astype(int) + 1,
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("factor", [1.5, 5.0])
def test_upsampling_uses_every_document_as_often_as_expected_in_each_pass(lengths, factor):
    long = lengths >= 4096
    rate = lengths.sum() / (factor * lengths[long].sum() + lengths[~long].sum())
    rates = np.where(long, factor * rate, rate)
    for number in (0, 3):
        drawn = [
            upsample_long_documents(lengths, 4096, factor, np.random.default_rng(seed), number) for seed in range(2000)
        ]
        # Uses are floor(rate) or one more: their mean has a standard deviation of at most 0.5 / sqrt(2000).
        assert np.abs(np.mean(drawn, axis=0) - rates).max() < 5 * 0.5 / 2000**0.5
        tokens = np.array([(uses * lengths).sum() for uses in drawn])
        assert tokens.mean() == pytest.approx(lengths.sum(), abs=5 * tokens.std() / 2000**0.5)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_upsampling_evens_out_over_passes(lengths):
    long = lengths >= 4096
    bound = 2 * lengths[long].max() + 2 * lengths[~long].max()
    for seed in range(20):
        uses = [upsample_long_documents(lengths, 4096, 5.0, np.random.default_rng(seed), i) for i in range(30)]
        for passes in (1, 2, 10, 30):
            total = sum(uses[:passes])
            assert abs((total * lengths).sum() - passes * lengths.sum()) <= bound
            assert np.ptp(total[long]) <= 1 and np.ptp(total[~long]) <= 1
        assert len({tuple(use) for use in uses}) > 1


def test_upsampling_by_one_or_without_long_documents_changes_nothing():
    lengths = np.array([10, 20, 5000])
    rng = np.random.default_rng(0)
    assert upsample_long_documents(lengths, 4096, 1.0, rng).tolist() == [1, 1, 1]
    assert upsample_long_documents(lengths, 9999, 5.0, rng).tolist() == [1, 1, 1]


def test_validation_takes_whole_documents():
    rng = np.random.default_rng(1)
    lengths = rng.integers(10, 1000, 500)
    chosen = choose_validation(lengths, 0.1, np.random.default_rng(2))
    assert lengths[chosen].sum() / lengths.sum() == pytest.approx(0.1, abs=0.01)
    assert not choose_validation(lengths, 0.0, rng).any()
    assert not choose_validation(lengths[:1], 0.5, rng).any()
    assert choose_validation(np.array([900, 800]), 0.1, rng).tolist() == [False, True]


# --- what stands in the rows


@pytest.mark.parametrize("seed", range(20))
def test_uses_are_those_of_the_rows(seed):
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(1, 30, 5), rng.integers(1, 30, 3)]
    rows = []
    for _ in range(8):
        row = []
        for source in rng.integers(0, 2, 3).tolist():
            document = int(rng.integers(len(lengths[source])))
            start, end = sorted(rng.choice(lengths[source][document] + 1, 2, replace=False).tolist())
            row.append(Segment(source, document, start, end))
        rows.append(row)
    seen = [[np.zeros(length, int) for length in of_source] for of_source in lengths]
    for segment in [segment for row in rows for segment in row]:
        seen[segment.source][segment.document][segment.start : segment.end] += 1
    uses = count_uses(rows, [SimpleNamespace(lengths=of_source) for of_source in lengths])
    assert [use.times.tolist() for use in uses] == [[int(x.max()) for x in of_source] for of_source in seen]
    assert [use.tokens.tolist() for use in uses] == [[int(x.sum()) for x in of_source] for of_source in seen]


def test_uses_of_no_rows():
    (uses,) = count_uses([], [SimpleNamespace(lengths=np.array([3, 4]))])
    assert uses.times.tolist() == uses.tokens.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("count", "kept"), [(0, []), (3, [(0, 3)]), (5, [(0, 5)]), (6, [(0, 5), (2, 3)]), (9, [(0, 5), (2, 6)])]
)
def test_first_tokens_of_a_row(count, kept):
    row = [Segment(0, 0, 0, 5), Segment(1, 0, 2, 6)]
    assert [(segment.start, segment.end) for segment in first_tokens(row, count)] == kept


# --- packing


def check_plan(plan, lengths, seq_length):
    """Every row full, every token of every document once."""
    assert all(sum(map(len, row)) == seq_length for row in plan.rows)
    assert sum(map(len, plan.rest)) < seq_length
    seen = [np.zeros(length, int) for length in lengths]
    for row in [*plan.rows, plan.rest]:
        for segment in row:
            seen[segment.document][segment.start : segment.end] += 1
    assert all((part == 1).all() for part in seen)


@pytest.mark.parametrize("seed", range(40))
def test_packing_uses_every_token_once(seed):
    rng = np.random.default_rng(seed)
    seq_length = int(rng.integers(1, 200))
    lengths = rng.integers(1, int(rng.integers(2, 500)), int(rng.integers(1, 80))).tolist()
    documents = [Segment(0, i, 0, length) for i, length in enumerate(lengths)]
    for shift in (False, True):
        plan = pack(documents, seq_length, rng, shift_windows=shift)
        check_plan(plan, lengths, seq_length)
        assert len(plan.rows) == sum(lengths) // seq_length


def test_long_documents_stay_whole():
    """Documents of 60 to 90 % of a row with short ones to fill up: only short ones are cut."""
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(600, 900, 50).tolist(), *rng.integers(5, 60, 800).tolist()]
    plan = pack([Segment(0, i, 0, length) for i, length in enumerate(lengths)], 1000, rng)
    check_plan(plan, lengths, 1000)
    whole = {s.document for row in plan.rows for s in row if s.start == 0 and s.end == lengths[s.document]}
    assert set(range(50)) <= whole
    assert len(lengths) - len(whole) < 60


def test_packing_is_reproducible():
    documents = [Segment(0, i, 0, 5 + i % 17) for i in range(100)]
    first, second = (pack(documents, 64, np.random.default_rng(3)) for _ in range(2))
    assert first.rows == second.rows
    assert pack(documents, 64, np.random.default_rng(4)).rows != first.rows
