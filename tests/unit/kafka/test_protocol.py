"""Tests the codecs of transaction requests: the bytes are those that aiokafka sends and reads."""

import struct
from typing import Any, Final

import msgspec
import pytest
from aiokafka.protocol.produce import ProduceResponse_v7
from aiokafka.protocol.transaction import AddPartitionsToTxnResponse_v0, EndTxnResponse_v0
from hypothesis import given
from hypothesis import strategies as st

from service.kafka.protocol import CODECS, AddPartitionsToTxnRequest, EndTxnRequest, ProduceRequest
from tests.unit.kafka.listening_brokers import VERSIONS

names = st.text(max_size=12)
int16 = st.integers(-(2**15), 2**15 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
requests = st.one_of(
    st.builds(
        ProduceRequest,
        st.none() | names,
        int16,
        int32,
        st.lists(st.tuples(names, st.lists(st.tuples(int32, st.binary(max_size=50)), max_size=3)), max_size=3),
    ),
    st.builds(
        AddPartitionsToTxnRequest,
        names,
        int64,
        int16,
        st.lists(st.tuples(names, st.lists(int32, max_size=3)), max_size=3),
    ),
    st.builds(EndTxnRequest, names, int64, int16, st.booleans()),
)
rows = st.lists(st.tuples(names, st.lists(st.tuples(int32, int16), max_size=3)), max_size=3)
answers = st.one_of(
    st.builds(
        ProduceResponse_v7,
        st.lists(
            st.tuples(names, st.lists(st.tuples(int32, int16, int64, int64, int64), max_size=3)),
            max_size=3,
        ),
        int32,
    ),
    st.builds(AddPartitionsToTxnResponse_v0, int32, rows),
    st.builds(EndTxnResponse_v0, int32, int16),
)
KINDS: Final[dict[type, Any]] = {
    ProduceResponse_v7: ProduceRequest,
    AddPartitionsToTxnResponse_v0: AddPartitionsToTxnRequest,
    EndTxnResponse_v0: EndTxnRequest,
}


@given(request=requests, correlation_id=st.integers(0, 2**31 - 1), client_id=st.text(max_size=20))
def test_a_request_is_encoded_as_aiokafka_encodes_it(request: Any, correlation_id: int, client_id: str) -> None:
    prepared = request.prepare(VERSIONS)
    message = prepared.build_request_header(correlation_id, client_id).encode() + prepared.encode()
    codec = CODECS[type(request)]
    size, pieces = codec.frame(request, correlation_id, client_id.encode())
    assert (codec.api_key, codec.version) == (prepared.API_KEY, prepared.API_VERSION)
    assert (size, b"".join(pieces)) == (len(message), struct.pack(">i", len(message)) + message)


@given(answer=answers, cut=st.integers(1, 1000))
def test_a_response_is_decoded_as_aiokafka_decodes_it(answer: Any, cut: int) -> None:
    encoded = b"\0\0\0\5" + answer.encode()
    codec = CODECS[KINDS[type(answer)]]
    read = codec.decode(encoded)
    theirs = type(answer).decode(encoded[4:])
    assert msgspec.structs.asdict(read) == {name: getattr(theirs, name) for name in theirs.SCHEMA.names}
    with pytest.raises((struct.error, UnicodeDecodeError)):
        codec.decode(encoded[: -min(cut, len(encoded))])
