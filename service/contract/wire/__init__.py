"""The wire contract, version 1: the format of all records and headers that Fencepost writes, and of ids.

Standard library only: the job and the tests read with these functions. The service writes with them too, except for
ledger entries and answers: tests compare the bytes of its faster encoders with those of this package. Test vectors with
the exact bytes are in `tests/vectors/v1`. A change here is a new version of the contract: a program that reads a newer
version than it knows refuses (NewerVersion). A field that older programs may ignore is no change.
"""
