"""The client of a Schema Registry (Confluent's API): look-ups, caches, pauses after failures, and Protobuf's compiler.

The only importer of httpx and grpc_tools. https://docs.confluent.io/platform/current/schema-registry/develop/api.html
"""
