//! Element types, shapes and the type of a tensor. Shapes are static and always global.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::quant::Format;

/// Sizes of the dimensions, outermost first. A scalar has none.
pub type Shape = SmallVec<[u64; 4]>;

/// How one element is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// The upper half of an IEEE binary32.
    Bf16,
    /// Two's complement: token ids, labels, seeds.
    I32,
    /// OCP FP8 with 4 exponent and 3 mantissa bits: largest number 448, no infinity.
    E4M3,
    /// OCP FP8 with 5 exponent and 2 mantissa bits: largest number 57344.
    E5M2,
}

impl DType {
    /// Every element type, for parsers and tests.
    pub const ALL: &[DType] = &[DType::F32, DType::Bf16, DType::I32, DType::E4M3, DType::E5M2];

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::Bf16 => 2,
            DType::E4M3 | DType::E5M2 => 1,
        }
    }

    /// The spelling in text IR and in `model.ron`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::E4M3 => "e4m3",
            DType::E5M2 => "e5m2",
        }
    }

    /// Whether values of this type are real numbers, so that gradients and partial sums exist. FP8
    /// values are codes, which mean something with their scale only.
    pub fn is_float(self) -> bool {
        match self {
            DType::F32 | DType::Bf16 => true,
            DType::I32 | DType::E4M3 | DType::E5M2 => false,
        }
    }

    /// Whether values of this type are FP8 codes.
    pub fn is_fp8(self) -> bool {
        self.fp8().is_some()
    }

    /// The format of FP8 codes.
    pub fn fp8(self) -> Option<Format> {
        match self {
            DType::F32 | DType::Bf16 | DType::I32 => None,
            DType::E4M3 => Some(Format::E4M3),
            DType::E5M2 => Some(Format::E5M2),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = String;

    fn from_str(s: &str) -> Result<DType, String> {
        let found = DType::ALL.iter().find(|it| it.name() == s);
        found
            .copied()
            .ok_or_else(|| format!("unknown dtype `{s}`; one of f32, bf16, i32, e4m3, e5m2"))
    }
}

/// Element type and global shape; prints as `bf16[4096, 1024]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// How an element is stored.
    pub dtype: DType,
    /// Global sizes.
    pub shape: Shape,
}

impl TensorType {
    /// `TensorType::new(DType::F32, &[2, 3])` is `f32[2, 3]`.
    pub fn new(dtype: DType, shape: &[u64]) -> TensorType {
        TensorType { dtype, shape: Shape::from_slice(shape) }
    }

    /// The type of a single number.
    pub fn scalar(dtype: DType) -> TensorType {
        TensorType { dtype, shape: Shape::new() }
    }

    /// The same shape with other elements.
    pub fn with_dtype(&self, dtype: DType) -> TensorType {
        TensorType { dtype, shape: self.shape.clone() }
    }

    /// Limits under which no count of elements, bytes or dims of one tensor overflows anywhere; einsum notation has
    /// a digit for each dim. Sums over all tensors are checked by [`Graph::exceeds`](crate::Graph::exceeds) and
    /// [`Plan::exceeds`](crate::plan::Plan::exceeds).
    pub const MAX_ELEMENTS: u64 = 1 << 46;
    /// The most dims of a tensor; see [`TensorType::MAX_ELEMENTS`].
    pub const MAX_DIMS: usize = 10;

    /// The limit that this type exceeds, if it does. Every tensor of a program is checked once,
    /// where it comes into being.
    pub fn exceeds(&self) -> Option<&'static str> {
        if self.ndim() > TensorType::MAX_DIMS {
            return Some("10 dims");
        }
        (!TensorType::fits(&self.shape)).then_some("2^46 elements")
    }

    /// Whether a tensor of this shape has few enough elements; sizes of 0 count as 1, so that no
    /// product of the others overflows.
    pub fn fits(shape: &[u64]) -> bool {
        let elements = shape.iter().try_fold(1u64, |res, &it| res.checked_mul(it.max(1)));
        elements.is_some_and(|it| it <= TensorType::MAX_ELEMENTS)
    }

    /// Number of dimensions.
    pub fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// Number of elements of the global tensor.
    pub fn n_elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of the global tensor.
    pub fn bytes(&self) -> u64 {
        self.n_elements() * self.dtype.bytes()
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, size) in self.shape.iter().enumerate() {
            write!(f, "{}{size}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str("]")
    }
}
