//! `codes` on other ops: some of their results as FP8 codes, and as nothing else.
//!
//! Where a scale is known before its tensor, which is delayed scaling, what makes the tensor quantizes it:
//!
//! ```text
//! %y, %y.amax = glu(amax:(of:[0])) %gate, %up
//! %y.codes = quantize(to:e4m3) %y, %s          %y.codes, %y.amax = glu(amax:(of:[0]),codes:(of:[(0,e4m3)])) %gate, %up, %s
//! ```
//!
//! Codes and amax are those of the result as it is computed, in f32, and not as it would be stored in the type of
//! the operands: so TransformerEngine's kernels do it under delayed scaling, and under no other (`te-spec` 1.8).

use serde::{Deserialize, Serialize};

use crate::ops::factors::Dims;
use crate::ops::{Factors, Op, Real, TypeError, Types, View, ViewMut, arity, number};
use crate::types::{DType, TensorType};

/// Results that are FP8 codes. The scale of each, one f32, is an operand behind the op's own, in the order of `of`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Codes {
    /// Which results, and the type of their codes.
    pub of: Box<[(usize, DType)]>,
}

impl Codes {
    /// Whether there are none.
    pub fn is_none(&self) -> bool {
        self.of.is_empty()
    }

    /// Adds codes of a result, of this type.
    pub fn push(&mut self, codes: (usize, DType)) {
        self.of = std::mem::take(&mut self.of).into_iter().chain([codes]).collect();
    }

    /// Of all operands, the op's own.
    pub fn own<'a, T>(&self, operands: &'a [T]) -> &'a [T] {
        &operands[..operands.len() - self.of.len()]
    }

    /// The operand that is the scale of `result`, counted from the end of the op's own.
    pub fn scale_of(&self, result: usize) -> Option<usize> {
        self.of.iter().position(|it| it.0 == result)
    }

    /// The op's own operands, of which there are `n`, if each scale is one number behind them.
    pub(crate) fn check<'a, 'b>(
        &self,
        inputs: &'a [&'b TensorType],
        n: usize,
    ) -> Result<&'a [&'b TensorType], TypeError> {
        arity(inputs, n + self.of.len())?;
        for operand in n..inputs.len() {
            number(inputs, operand)?;
        }
        Ok(&inputs[..n])
    }

    /// The types of the op's own results, of which some are codes.
    pub(crate) fn infer(&self, mut own: Types) -> Result<Types, TypeError> {
        for (i, &(of, to)) in self.of.iter().enumerate() {
            if of >= own.len() || self.of[..i].iter().any(|it| it.0 == of) {
                return Err(TypeError::Attribute { why: "codes must be of different results" });
            }
            if !to.is_fp8() {
                return Err(TypeError::Attribute { why: "codes are e4m3 or e5m2" });
            }
            own[of].dtype = to;
        }
        Ok(own)
    }

    /// Adds the scales to the factors of the op's own operands.
    pub(crate) fn factors(&self, mut factors: Factors) -> Factors {
        factors.inputs.extend(self.of.iter().map(|_| Dims::new()));
        factors
    }

    /// Scales results that are made, whose amaxes have been taken; rounding happens where the caller stores them.
    pub(crate) fn reference<T: Real>(&self, inputs: &[View<'_, T>], own: &mut [ViewMut<'_, T>]) {
        let scales = &inputs[inputs.len() - self.of.len()..];
        for (&(of, _), scale) in self.of.iter().zip(scales) {
            own[of].data.iter_mut().for_each(|it| *it *= scale.data[0]);
        }
    }
}

/// The codes of an op, borrowed as asked: of those whose kernels make some.
macro_rules! codes {
    ($op:expr, $($borrow:tt)+) => {
        match $op {
            Op::LayerNorm(it) => Some($($borrow)+ it.codes),
            Op::RmsNorm(it) => Some($($borrow)+ it.codes),
            _ => None,
        }
    };
}

impl Op {
    /// Which of its results are codes; `None` if it cannot make any.
    pub fn codes(&self) -> Option<&Codes> {
        codes!(self, &)
    }

    /// The same, to add some.
    pub fn codes_mut(&mut self) -> Option<&mut Codes> {
        codes!(self, &mut)
    }
}
