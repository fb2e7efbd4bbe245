import json

import fsspec
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from milesbatch.environments.files import FileStream
from milesbatch.environments.prompts import Message
from milesbatch.errors import DataError
from milesbatch.recipe.models import FileData

ROWS = [{"prompt": f"{i}+1=", "answer": i + 1, "level": {"hard": i > 2}} for i in range(5)]


def jsonl(path, rows) -> FileData:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileData(path=str(path))


def written(tmp_path, kind: str) -> FileData:
    table = pa.Table.from_pylist(ROWS)
    path = tmp_path / f"p.{kind.removeprefix('stream-')}"
    if kind == "jsonl":
        return jsonl(path, ROWS)
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        new = pa.ipc.new_stream if kind.startswith("stream-") else pa.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
    return FileData(path=str(path))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "stream-arrow"])
def test_every_format_gives_the_same_prompts_once_an_epoch(tmp_path, kind):
    stream = FileStream(written(tmp_path, kind), seed=3)
    epochs = [[stream.prompt(e * 5 + i) for i in range(5)] for e in range(3)]
    for epoch in epochs:
        assert sorted(prompt.text for prompt in epoch) == [row["prompt"] for row in ROWS]
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    one = next(prompt for prompt in epochs[0] if prompt.text == "3+1=")
    assert (one.answer, one.env, one.prompt_id) == ("4", {"level": {"hard": True}}, "row-4")
    again = FileStream(written(tmp_path, kind), seed=3)
    assert again.prompt(13) == epochs[2][3]


def test_messages_and_ids(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    data = jsonl(tmp_path / "p.jsonl", [{"q": chat, "a": "4", "id": 17}])
    prompt = FileStream(data.model_copy(update={"prompt_field": "q", "answer_field": "a", "id_field": "id"}), 0).prompt(
        9
    )
    assert prompt.messages == (Message("system", "Be brief."), Message("user", "2+2?"))
    assert (prompt.prompt_id, prompt.answer) == ("17", "4")


def test_every_broken_line_is_named_with_what_is_wrong(tmp_path):
    path = tmp_path / "p.jsonl"
    good = b'{"prompt": "1+1=", "answer": "2"}\n'
    path.write_bytes(
        good + b'{"prompt": "1+1=", "answer"\n' + b"\n" + b'{"prompt": "2", "reply": "2"}\n' + b"[1]\n"
        b'{"prompt": "\xff", "answer": "1"}\n'
        + b'{"prompt": [], "answer": "1"}\n'
        + b'{"prompt": null, "answer": ""}\n'
    )
    with pytest.raises(DataError) as caught:
        FileStream(FileData(path=str(path)), 0)
    text = str(caught.value)
    assert "6 broken rows of 7" in text
    assert f"{path}, line 2: not JSON" in text
    assert f"{path}, line 4: no field 'answer'; fields: 'prompt', 'reply'" in text
    assert f"{path}, line 5: a JSON object is needed, found list" in text
    assert f"{path}, line 6: not UTF-8" in text
    assert f"{path}, line 7: field 'prompt' must be" in text
    assert "and 1 more" in text


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.jsonl", b"", "is empty"),
        ("p.jsonl", b"\n\n", "holds no row"),
        ("p.csv", b"a,b\n", "ending"),
        ("p.parquet", b"PAR1 no", "cannot be read as parquet"),
        ("p.arrow", b"ARROW1\0\0 no", "cannot be read as arrow"),
        ("p.arrow", b"no arrow", "cannot be read as arrow"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        FileStream(FileData(path=str(tmp_path / name)), 0)
    assert says in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("path", ["/no/such/file.jsonl", "nosuchscheme://x/file.jsonl"])
def test_a_missing_file_is_named(path):
    with pytest.raises(DataError, match=path):
        FileStream(FileData(path=path), 0)


def test_any_fsspec_url_and_the_content_decides_the_fingerprint(tmp_path):
    local = jsonl(tmp_path / "p.jsonl", ROWS)
    with fsspec.open("memory://prompts/p.jsonl", "wb") as stream:
        stream.write((tmp_path / "p.jsonl").read_bytes())
    remote = FileStream(FileData(path="memory://prompts/p.jsonl"), 0)
    assert remote.fingerprint() == FileStream(local, 0).fingerprint()
    assert remote.prompt(2) == FileStream(local, 0).prompt(2)
    changed = FileStream(jsonl(tmp_path / "q.jsonl", ROWS[:4]), 0)
    assert changed.fingerprint() != remote.fingerprint()
