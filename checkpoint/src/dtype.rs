//! [`StoredType`]: the element types that PyTorch stores, and their names in each format.

mod number;

use std::fmt;

use ir::DType;

/// How one stored element is encoded; always little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StoredType {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of an IEEE binary32.
    Bf16,
    /// Two's complement, 64 bits.
    I64,
    /// Two's complement, 32 bits.
    I32,
    /// Two's complement, 16 bits.
    I16,
    /// Two's complement, 8 bits.
    I8,
    /// Unsigned, 64 bits.
    U64,
    /// Unsigned, 32 bits.
    U32,
    /// Unsigned, 16 bits.
    U16,
    /// Unsigned, 8 bits.
    U8,
    /// A byte that is 0 or 1.
    Bool,
    /// OCP FP8 with 4 exponent bits, no infinity.
    E4M3,
    /// OCP FP8 with 5 exponent bits.
    E5M2,
    /// FP8 with 4 exponent bits, neither infinity nor a negative zero (AMD, Graphcore).
    E4M3Fnuz,
    /// FP8 with 5 exponent bits, neither infinity nor a negative zero.
    E5M2Fnuz,
    /// A power of two: scales of MXFP8.
    E8M0,
    /// Two FP4 codes in a byte, which counts as one element.
    E2M1x2,
    /// Two binary16 numbers: real and imaginary part.
    Complex32,
    /// Two binary32 numbers.
    Complex64,
    /// Two binary64 numbers.
    Complex128,
}

/// A row of the table: type, PyTorch's name, name in a safetensors file, class of the storage in an
/// item of `torch.save`, bytes.
type Row = (StoredType, &'static str, Option<&'static str>, Option<&'static str>, u64);

const TABLE: &[Row] = &[
    (StoredType::F64, "float64", Some("F64"), Some("DoubleStorage"), 8),
    (StoredType::F32, "float32", Some("F32"), Some("FloatStorage"), 4),
    (StoredType::F16, "float16", Some("F16"), Some("HalfStorage"), 2),
    (StoredType::Bf16, "bfloat16", Some("BF16"), Some("BFloat16Storage"), 2),
    (StoredType::I64, "int64", Some("I64"), Some("LongStorage"), 8),
    (StoredType::I32, "int32", Some("I32"), Some("IntStorage"), 4),
    (StoredType::I16, "int16", Some("I16"), Some("ShortStorage"), 2),
    (StoredType::I8, "int8", Some("I8"), Some("CharStorage"), 1),
    (StoredType::U64, "uint64", Some("U64"), None, 8),
    (StoredType::U32, "uint32", Some("U32"), None, 4),
    (StoredType::U16, "uint16", Some("U16"), None, 2),
    (StoredType::U8, "uint8", Some("U8"), Some("ByteStorage"), 1),
    (StoredType::Bool, "bool", Some("BOOL"), Some("BoolStorage"), 1),
    (StoredType::E4M3, "float8_e4m3fn", Some("F8_E4M3"), None, 1),
    (StoredType::E5M2, "float8_e5m2", Some("F8_E5M2"), None, 1),
    (StoredType::E4M3Fnuz, "float8_e4m3fnuz", Some("F8_E4M3FNUZ"), None, 1),
    (StoredType::E5M2Fnuz, "float8_e5m2fnuz", Some("F8_E5M2FNUZ"), None, 1),
    (StoredType::E8M0, "float8_e8m0fnu", Some("F8_E8M0"), None, 1),
    // safetensors counts halves of bytes where PyTorch counts bytes.
    (StoredType::E2M1x2, "float4_e2m1fn_x2", None, None, 1),
    (StoredType::Complex32, "complex32", None, None, 4),
    (StoredType::Complex64, "complex64", Some("C64"), Some("ComplexFloatStorage"), 8),
    (StoredType::Complex128, "complex128", None, Some("ComplexDoubleStorage"), 16),
];

impl StoredType {
    /// Every type.
    pub fn all() -> impl Iterator<Item = StoredType> {
        TABLE.iter().map(|it| it.0)
    }

    fn row(self) -> &'static Row {
        // The table is in the order of the variants, which a test checks.
        &TABLE[self as usize]
    }

    /// Its name in PyTorch, without `torch.`.
    pub fn torch(self) -> &'static str {
        self.row().1
    }

    /// Its name in the header of a safetensors file, if it can be stored there.
    pub fn safetensors(self) -> Option<&'static str> {
        self.row().2
    }

    /// PyTorch's class of a storage of this type; those without one are stored as bytes.
    pub(crate) fn storage(self) -> Option<&'static str> {
        self.row().3
    }

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        self.row().4
    }

    /// The type that PyTorch calls `name`, as in `float32`.
    pub fn from_torch(name: &str) -> Option<StoredType> {
        TABLE.iter().find(|it| it.1 == name).map(|it| it.0)
    }

    /// The type that safetensors calls `name`, as in `F32`.
    pub fn from_safetensors(name: &str) -> Option<StoredType> {
        TABLE.iter().find(|it| it.2 == Some(name)).map(|it| it.0)
    }

    pub(crate) fn from_storage(name: &str) -> Option<StoredType> {
        TABLE.iter().find(|it| it.3 == Some(name)).map(|it| it.0)
    }

    /// The type of planc that has the same values and encoding.
    pub fn dtype(self) -> Option<DType> {
        DType::ALL.iter().copied().find(|&it| StoredType::from(it) == self)
    }

    /// Bytes whose order turns with the order of bytes: a part of a complex number, or the element.
    pub(crate) fn word(self) -> u64 {
        match self {
            StoredType::Complex32 | StoredType::Complex64 | StoredType::Complex128 => {
                self.bytes() / 2
            }
            _ => self.bytes(),
        }
    }
}

impl From<DType> for StoredType {
    fn from(it: DType) -> StoredType {
        match it {
            DType::F32 => StoredType::F32,
            DType::Bf16 => StoredType::Bf16,
            DType::I32 => StoredType::I32,
            DType::E4M3 => StoredType::E4M3,
            DType::E5M2 => StoredType::E5M2,
        }
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.torch())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_variants() {
        assert!(TABLE.iter().enumerate().all(|(i, it)| it.0 as usize == i));
        assert_eq!(StoredType::Complex128 as usize + 1, TABLE.len());
    }
}
