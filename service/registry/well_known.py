"""Protobuf files that schemas import without a reference: Confluent's registry and its clients have them built in.

Google's own (google/protobuf/*.proto) come with protoc.
"""

from typing import Final

# The annotations of files, messages, fields and enums: documentation, tags and rules, which do not change the encoding.
_META: Final = """\
syntax = "proto3";
package confluent;
import "google/protobuf/descriptor.proto";
message Meta {
  string doc = 1;
  map<string, string> params = 2;
  repeated string tags = 3;
  repeated Rule rules = 4;
}
message Rule {
  string name = 1;
  string doc = 2;
  string expr = 3;
  string sql = 4;
}
extend google.protobuf.FileOptions { Meta file_meta = 1088; }
extend google.protobuf.MessageOptions { Meta message_meta = 1088; }
extend google.protobuf.FieldOptions { Meta field_meta = 1088; }
extend google.protobuf.EnumOptions { Meta enum_meta = 1088; }
extend google.protobuf.EnumValueOptions { Meta enum_value_meta = 1088; }
"""
# `value` is the unscaled number in two's complement, big-endian.
_DECIMAL: Final = """\
syntax = "proto3";
package confluent.type;
message Decimal {
  bytes value = 1;
  uint32 precision = 2;
  int32 scale = 3;
}
"""
_VARIANT: Final = """\
syntax = "proto3";
package confluent.type;
message Variant {
  bytes metadata = 1;
  bytes value = 2;
}
"""
FILES: Final = {
    "confluent/meta.proto": _META,
    "confluent/type/decimal.proto": _DECIMAL,
    "confluent/type/variant.proto": _VARIANT,
    # An earlier name of the same file.
    "confluent/types/decimal.proto": 'syntax = "proto3";\nimport public "confluent/type/decimal.proto";\n',
}
"""The text of each file by the name that imports have."""
