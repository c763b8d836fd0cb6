"""The text form of a workload; whatever is wrong in it is named in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import reference_pages
from alignedserve.config.sources import read_value
from alignedserve.core import ServiceClass
from alignedserve.errors import WorkloadError
from alignedserve.lab.loads.workload import Load, Mixture, arrivals
from alignedserve.lab.loads.workload.amounts import (
    DrawnSizes,
    Exponential,
    Fixed,
    RecordedLengths,
    Sampled,
    ShortLong,
    Uniform,
)
from alignedserve.lab.loads.workload.build import ARRIVALS, KINDS, Whole, Windows, keys_of
from alignedserve.lab.loads.workload.pace import ClosedArrivals, Gamma, Recorded
from alignedserve.lab.loads.workload.spec import NAMED, read_workload
from alignedserve.lab.loads.workload.stream import ClientLimits, Foresight, Span, Stream, StreamPromise, Turns

SHAREGPT = Path(__file__).parent / "data" / "sharegpt300.csv"
PARTS = (*KINDS.values(), *ARRIVALS.values(), Windows, StreamPromise, Turns, ClientLimits, Foresight, Span)
DOCS = Path(__file__).parents[2] / "docs" / "how" / "simulate.md"

FILE = """
first_s: 30
streams:
  - name: chat
    kind: lengths
    path: lengths.csv
    rate: 5.5
    ttft_s: 0.5-1.5
  - name: documents
    prompt: 512-1024
    output: 100
    arrivals: closed
    in_flight: 8
    replace: true
    service: be
    first_s: 20
"""


CHATS = (
    '{"messages": [{"role": "system", "content": "12345678"}, {"role": "user", "content": "1234"}]}\n\n'
    '{"model": "m", "messages": [{"role": "user", "content": "12345678"}, {"role": "assistant", "content": "1234"}, '
    '{"role": "user", "content": "123456781234"}, {"role": "assistant", "content": "1234"}]}\n'
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder of a user, with three files of requests and a workload."""
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens,model\n0.5,10,2,a\n1.5,20,3,b\n")
    (tmp_path / "lengths.csv").write_text("arrival_s,prompt_tokens,output_tokens\n,10,2\n,20,3\n")
    (tmp_path / "chats.jsonl").write_text(CHATS)
    (tmp_path / "workload.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def only(text: str) -> Stream:
    (stream,) = read_workload(text).streams
    return stream


@pytest.mark.usefixtures("folder")
def test_a_stream_of_a_file_of_lengths() -> None:
    stream = only("lengths:lengths.csv,rate=5.5,cv=2,num_requests=40")
    assert stream == Stream("lengths", Gamma(5.5, 2.0), Sampled(((10, 2), (20, 3))), span=Span(num_requests=40))


def test_a_mix_with_what_every_stream_can_have() -> None:
    stream = only("mix:short=0.7,output=64,arrivals=closed,in_flight=3,service=be,turns=2,think_s=exp:2:9,first_s=60")
    turns = Turns(Fixed(2), think_s=Exponential(2, 9))
    lengths = ShortLong(0.7, output=Fixed(64))
    assert stream == Stream(
        "mix", ClosedArrivals(3), lengths, StreamPromise(ServiceClass.BE), turns, span=Span(first_s=60.0)
    )


def test_any_sizes() -> None:
    stream = only("sizes:prompt=512-1024,output=32-128,rate=2,max_tokens=128")
    clients = ClientLimits(max_tokens=128)
    lengths = DrawnSizes(Uniform(512, 1024), Uniform(32, 128))
    assert stream == Stream("sizes", Gamma(2.0), lengths, clients=clients, span=Span(num_requests=1000))


@pytest.mark.usefixtures("folder")
def test_a_file_of_streams() -> None:
    chat, documents = read_workload("workload.yaml").streams
    assert chat.lengths == Sampled(((10, 2), (20, 3)))
    assert chat.promise == StreamPromise(ttft_s=Uniform(0.5, 1.5))
    assert documents.arrivals == ClosedArrivals(8, replace=True)
    assert (chat.span, documents.span) == (Span(first_s=30.0), Span(first_s=20.0))


def test_paths_in_a_file_begin_where_the_file_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert len(read_workload(f"{folder}/workload.yaml").streams) == 2


def test_json_says_the_same(folder: Path) -> None:
    tree = {"streams": [{"kind": "trace", "path": "trace.csv", "service": "be"}], "rate_scale": 2}
    (folder / "workload.json").write_text(json.dumps(tree))
    found = list(arrivals(read_workload("workload.json"), ("gateway-0",), 1, 0.0))
    assert [arrival.request.arrival_at for arrival in found] == [0.0, 0.5]
    assert {arrival.request.service for arrival in found} == {ServiceClass.BE}


@pytest.mark.usefixtures("folder")
def test_the_command_line_outweighs_the_file() -> None:
    chat, documents = read_workload("workload.yaml,rate=2,documents.in_flight=64,first_s=5").streams
    assert (chat.arrivals, documents.arrivals) == (Gamma(2.0), ClosedArrivals(64, replace=True))
    assert chat.span == documents.span == Span(first_s=5.0)


@pytest.mark.parametrize("text", ["chat,rate=5.5", "bursts,rate=5.5", "diurnal,rate=5.5", "coserve,rate=5.5"])
def test_a_rate_is_that_of_all_that_arrives_by_itself(text: str) -> None:
    assert read_workload(text).rate == pytest.approx(5.5)
    assert read_workload(text.replace("=5.5", "_scale=2")).rate == pytest.approx(2 * read_workload(text[:-9]).rate)


@pytest.mark.parametrize("name", NAMED)
def test_named_workloads_have_requests(name: str) -> None:
    workload = read_workload(f"{name},first_s=20")
    assert isinstance(workload, Mixture)
    assert list(arrivals(workload, ("gateway-0",), 1, 0.0))


def test_a_system_prompt_leaves_a_token_for_a_question_and_one_for_its_answer() -> None:
    assert read_workload("chat,system=16382").streams[0].turns.system == 16_382


def test_what_is_named_is_not_changed_by_its_use() -> None:
    assert read_workload("chat,num_requests=3") != read_workload("chat")
    assert "num_requests" not in NAMED["chat"]["streams"][0]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is none of these: chat, coserve"),
        ("chta", "did you mean chat?"),
        ("pictures:x.csv", "trace:, lengths:, mix:, sizes:"),
        ("missing.yaml", "missing.yaml cannot be read: No such file"),
        ("chat,rte=4", "stream chat: rte is not a key of sizes with arrivals gamma, which are prompt, output, rate"),
        ("chat,rte=4", "did you mean rate?"),
        ("chat,rate", "'rate' must be written KEY=VALUE"),
        ("chat,cv=1,cv=2", "cv is given twice"),
        ("chat,rate=-1", "rate must be 0.0001 or more, not -1"),
        ("chat,rate=fast", "rate must be a number, not the text 'fast'"),
        ("chat,rate=nan", "rate must be a finite number"),
        ("chat,rate=1,rate_scale=2", "rate and rate_scale exclude each other"),
        ("chat,num_requests=2.5", "stream chat: num_requests must be an integer, not the text '2.5'"),
        ("chat,arrivals=gama", "arrivals must be one of gamma, bursts, diurnal, closed, at_once, not 'gama'"),
        ("chat,kind=pictures", "kind must be one of trace, lengths, mix, sizes, chats, not 'pictures'"),
        ("chat,arrivals=closed,cv=2", "cv is not a key of sizes with arrivals closed"),
        ("conversations,arrivals=closed", "rate is not a key of sizes with arrivals closed"),
        ("mix:arrivals=closed,rate=2", "rate cannot be set: no stream of this workload has a rate"),
        ("chat,arrivals=at_once,first_s=3", "never ends: give it num_requests, or first_s unless all come at once"),
        ("diurnal,least=9", "least must be most 8 or less, not 9"),
        ("bursts,lasts_s=31", "lasts_s must be every_s 30 or less, not 31"),
        ("chat,service=best", "service must be one of rt, be, not the text 'best'"),
        ("chat,think_s=3", "think_s has no effect without turns"),
        ("chat,patience_s=3", "patience_s has no effect without leaving_share"),
        ("chat,system=16383", "system must leave room in the context of 16384 tokens"),
        ("chat,name=a b", "a stream's name consists of letters, digits, - and _, not 'a b'"),
        ("chat,leaving_share=2", "leaving_share must be 1 or less"),
        ("mix:short=2", "short must be 1 or less, not 2"),
        ("coserve,in_flight=3", "in_flight is not a key of the whole (first_s, rate, rate_scale, length_scale)"),
        ("coserve,in_flight=3", "keys of a stream are written chat.KEY or documents.KEY"),
        ("coserve,chatt.rate=3", "chatt.rate is not a key of the whole"),
        ("lengths:", "path must not be empty"),
        ("lengths:missing.csv", "missing.csv cannot be read: No such file"),
        ("trace:lengths.csv", "lengths.csv line 2: arrival_s is empty"),
        ("trace:lengths.csv", "lengths:PATH, with a rate"),
        ("trace:trace.csv,turns=3", "turns is not a key of a trace"),
        ("trace:trace.csv,arrivals=gamma", "arrivals is not a key of a trace"),
    ],
)
def test_whatever_is_wrong_is_named(text: str, problem: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(problem)) as caught:
        read_workload(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "size",
    [
        "0",
        "-5",
        "9-3",
        "1-2-3",
        "nan",
        "inf",
        "",
        "|",
        "5@",
        "5@0",
        "5@1e308",
        "exp:3",
        "exp:3:x",
        "uniform:1:2",
        "1e308",
        "1e400",
    ],
)
def test_amounts_that_are_none(size: str) -> None:
    with pytest.raises(
        WorkloadError, match=r"prompt must be tokens of a prompt, written 200, 512-1024|must not be empty"
    ):
        read_workload(f"sizes:prompt={size}")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("", "has no column arrival_s"),
        ("arrival_s,prompt_tokens\n1,2", "has no column output_tokens: its first line must name arrival_s"),
        ("arrival_s,prompt_tokens,output_tokens\n", "has no requests"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,5\nsoon,5,5", "line 3: arrival_s must be a number of seconds"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,5\ninf,5,5", "line 3: arrival_s must be a number of seconds"),
        ("arrival_s,prompt_tokens,output_tokens\n3,5,5\n2,5,5", "line 3: arrival_s is earlier than in the line before"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,-1", "line 2: output_tokens must be a whole number of 0 or more"),
        ("arrival_s,prompt_tokens,output_tokens\n0,5,0\n1,0,5", "wrong.csv has no requests"),
        (
            "arrival_s,prompt_tokens,output_tokens\n0,5",
            "line 2: output_tokens is empty: fill it in, or remove the line",
        ),
        ("arrival_s,prompt_tokens,output_tokens\n0,5.5,5", "line 2: prompt_tokens must be a whole number"),
        (
            "arrival_s,prompt_tokens,output_tokens\n1e308,5,5",
            "line 2: arrival_s must be a number of seconds, up to 1e+10",
        ),
        (f"arrival_s,prompt_tokens,output_tokens\n0,{'9' * 5000},5", "line 2: prompt_tokens must be a whole number"),
        ("arrival_s,prompt_tokens,output_tokens\n0,²,5", "line 2: prompt_tokens must be a whole number"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(folder: Path, lines: str, problem: str) -> None:
    (folder / "wrong.csv").write_text(lines, encoding="utf-8")
    with pytest.raises(WorkloadError, match=re.escape(problem)):
        read_workload("trace:wrong.csv")


@pytest.mark.parametrize("kind", ["trace", "lengths"])
def test_rows_without_tokens_are_left_out_and_counted(folder: Path, kind: str) -> None:
    (folder / "some.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,0\n1,6,7\n2,0,9\n4,8,9\n")
    (stream,) = read_workload(f"{kind}:some.csv").streams
    assert stream.notes == ("some.csv: 2 of 4 rows have no prompt or no output, and were left out",)
    lengths, arrivals = stream.lengths, stream.arrivals
    assert isinstance(lengths, RecordedLengths | Sampled)
    assert lengths.pairs == ((6, 7), (8, 9))
    assert not isinstance(arrivals, Recorded) or arrivals.times == (1.0, 4.0)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("chat,num_requests=7", 7),
        ("chat", 1000),
        ("chat,first_s=3", None),
        ("conversations", None),
        ("coserve", None),
        ("trace:some.csv", 3),
        ("trace:some.csv,first_s=1.5", 2),
        ("trace:some.csv,first_s=1.5,rate_scale=2", 3),
        ("trace:some.csv,num_requests=1", 1),
    ],
)
def test_how_many_requests_there_will_be(folder: Path, text: str, number: int | None) -> None:
    (folder / "some.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,1\n1,6,7\n2,1,9\n")
    load = Load(read_workload(text), ("gateway-0",), seed=1)
    assert load.expected == number
    if number is not None:
        assert sum(1 for _ in arrivals(read_workload(text), ("gateway-0",), 1, 0.0)) == number


def test_a_file_that_is_no_text(folder: Path) -> None:
    (folder / "wrong.csv").write_bytes(b"\xff\xfe\x00arrival")
    with pytest.raises(WorkloadError, match=r"wrong.csv is not a CSV file"):
        read_workload("trace:wrong.csv")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("streams: []", "streams must be a list of at least one stream"),
        ("first_s: 3", "streams must be a list of at least one stream"),
        ("streams: {chat: 1}", "streams must be a list"),
        ("streams: [chat]", "stream 1 must be keys and values"),
        ("streams: [{rate: 1}, {name: b}]", "stream 1 must have a name"),
        ("streams: 5", "streams must be a list"),
        ("streams: [{name: b}, {name: b}]", "2 streams are called b"),
        ("streams: [{rate: yes}]", "stream 1: rate must be a number, not true"),
        ("streams: [{name: , rate: 1}]", "stream 1: name must be text, not nothing"),
        ("streams: [{name: 5}]", "stream 1: name must be text, not the number 5"),
        ("streams: [{name: ''}]", "stream 1: name must not be empty"),
        ("streams: [{rate: .nan}]", "stream 1: rate must be a finite number, not nan"),
        ("streams: [{rate: .inf}]", "stream 1: rate must be a finite number, not inf"),
        ("streams: [{rate: 1e+300}]", "stream 1: rate must be 1000000.0 or less, not 1e+300"),
        ("streams: [{output: 1e+300}]", "stream 1: output must be tokens of an output, written 200"),
        ("streams:\n  - name: a\n    rate: 1\n    rate: 2", "wrong.yaml: rate is given twice, again in line 4"),
        ("first_s: 1\nstreams: [{name: a}]\nfirst_s: 2", "wrong.yaml: first_s is given twice, again in line 3"),
        ("streams: [{prompt: [1, 2]}]", "prompt must be tokens of a prompt"),
        ("streams: [{kind: lengths}]", "path is missing: CSV file with prompt_tokens"),
        ("streams: [{rate: 1}]\nlast_s: 3", "last_s is not a key of a workload, beside streams"),
        ("streams: [{rate: 1}]\nfirst_s: x", "first_s must be a number, not the text 'x'"),
        ("streams: [", "is not valid YAML"),
        ("- name: chat", "must hold settings by name"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(folder: Path, text: str, problem: str) -> None:
    (folder / "wrong.yaml").write_text(text)
    with pytest.raises(WorkloadError, match=re.escape(problem)) as caught:
        read_workload("wrong.yaml")
    assert str(caught.value).startswith("wrong.yaml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"streams": [{"name": "a"},]}', "wrong.json is not valid JSON: "),
        ("streams: [{name: a}]", "wrong.json is not valid JSON: Expecting value: line 1 column 1"),
        ("", "wrong.json is not valid JSON: "),
        ('{"streams": [{"rate": NaN}]}', "wrong.json is not valid JSON: NaN is not a JSON number"),
        ('{"streams": [{"rate": 1e400}]}', "stream 1: rate must be a finite number, not inf"),
        ('{"streams": [\n\t{"rate": 1,\n\t"rate": 2}]}', "wrong.json: rate is given twice, again in line 3"),
        ("[]", "wrong.json must hold settings by name, not a list"),
    ],
)
def test_what_is_wrong_in_json_is_named_as_that(folder: Path, text: str, problem: str) -> None:
    (folder / "wrong.json").write_text(text)
    with pytest.raises(WorkloadError, match=re.escape(problem)) as caught:
        read_workload("wrong.json")
    assert "YAML" not in str(caught.value)


def test_json_may_be_indented_with_tabs(folder: Path) -> None:
    (folder / "workload.json").write_text('{\n\t"streams": [\n\t\t{"name": "a", "rate": 3}\n\t]\n}\n')
    assert only("workload.json") == only("sizes:name=a,rate=3")


@pytest.mark.parametrize("streams", ["5", "[]", "{chat: 1}", "[chat]"])
def test_a_key_on_the_command_line_hides_nothing_that_is_wrong_in_the_file(folder: Path, streams: str) -> None:
    (folder / "wrong.yaml").write_text(f"streams: {streams}")
    with pytest.raises(WorkloadError, match=r"wrong.yaml: stream"):
        read_workload("wrong.yaml,cv=3")


# --- Files of chats


@pytest.mark.usefixtures("folder")
def test_a_file_of_chats_is_asked_turn_by_turn() -> None:
    """The second chat has two turns, of 2 and 3 tokens; its second prompt holds the first and the answer."""
    load = Load(read_workload("chats:chats.jsonl,rate=1,cv=0,num_requests=3,think_s=2,output=5"), ["g"], 0)
    asked, waiting = list[tuple[str, int]](), load.start(0.0)
    while waiting:
        request = waiting.pop(0).request
        asked.append((request.id, len(request.prompt)))
        waiting += load.arrived(request.id) + load.ended(request.id, request.arrival_at + 1, (1, 2, 3, 4))
    assert sorted(asked) == [("chats-0", 3), ("chats-1", 2), ("chats-1.1", 9), ("chats-2", 3)]
    assert load.expected is None, "chats may end before their last turn"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[]", "line 1 has no messages"),
        ('{"prompt": "a"}', "line 1 has no messages"),
        ('{"messages": [{"role": "user"}]}', "a message must have a role and a text as its content"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "nobody asks anything in this chat"),
        ("{", "has no messages, such as"),
        ("", "has no chats"),
    ],
)
def test_a_wrong_file_of_chats_is_named(folder: Path, line: str, problem: str) -> None:
    (folder / "wrong.jsonl").write_text(line)
    with pytest.raises(WorkloadError, match=re.escape(problem)):
        read_workload("chats:wrong.jsonl,rate=1")


@pytest.mark.usefixtures("folder")
def test_chats_have_the_turns_of_their_file() -> None:
    with pytest.raises(WorkloadError, match="turns has no effect: each chat of the file has as many as it has"):
        read_workload("chats:chats.jsonl,turns=3")


# --- The documentation


@pytest.mark.usefixtures("folder")
def test_the_examples_of_the_docs_are_true() -> None:
    examples = re.findall(r"--workload (\S+)", DOCS.read_text())
    assert len(examples) >= 8
    for example in examples:
        read_workload(example)


def test_a_default_of_the_page_is_read_as_that_default() -> None:
    told = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", reference_pages.section("workload_keys"), re.MULTILINE)
    keys = [key for part in (*PARTS, Whole) for key in keys_of(part).values()]
    for key in keys:
        if key.default not in (None, ""):
            texts = [text for name, text in told if name == key.path]
            assert any(read_value(key, text, key.path) == key.default for text in texts), key.path
