//! Pieces: equal ranges of a dimension that each have a scale of their own.
//!
//! A scale is one number, or a tensor with one dimension for each dimension that is in pieces:
//! an activation `[b, s, k]` whose scale varies over two data-parallel coordinates has a scale `[2]` with
//! pieces along dim 0. A rank that holds one piece holds one number.

use smallvec::SmallVec;

use crate::ops::{Shape, TypeError, same_size};
use crate::types::TensorType;

/// Checks that `scale` has one dimension for each of `dims`, dimensions of `x`, whose size it divides.
pub(crate) fn check(x: &TensorType, scale: &TensorType, dims: &[usize]) -> Result<(), TypeError> {
    same_size("dims of a scale and dims in pieces", scale.ndim() as u64, dims.len() as u64)?;
    let distinct = dims.iter().enumerate().all(|(i, it)| !dims[..i].contains(it));
    if !distinct || dims.iter().any(|&it| it >= x.ndim()) {
        return Err(TypeError::Attribute { why: "dims in pieces must be different dims of `x`" });
    }
    for (&dim, &n) in dims.iter().zip(&scale.shape) {
        if n == 0 || !x.shape[dim].is_multiple_of(n) {
            let what = "a dim in pieces";
            return Err(TypeError::Multiple { what, size: x.shape[dim], of: n });
        }
    }
    Ok(())
}

/// Einsum notation of a tensor whose dims are called `names`, some of them in pieces: `(A a) b c`.
pub(crate) fn notation(names: &str, dims: &[usize]) -> String {
    let part = |(i, c): (usize, char)| match dims.contains(&i) {
        true => format!("({} {c}) ", c.to_ascii_uppercase()),
        false => format!("{c} "),
    };
    names.chars().enumerate().map(part).collect()
}

/// Einsum notation of its scale: `A`.
pub(crate) fn scale_notation(names: &str, dims: &[usize]) -> String {
    dims.iter().map(|&it| names.as_bytes()[it].to_ascii_uppercase() as char).collect()
}

/// Sizes of the factors of the pieces, for [`Factors::with_sizes`](crate::ops::Factors::with_sizes).
pub(crate) fn sizes(names: &str, dims: &[usize], scale: &Shape) -> SmallVec<[(char, u64); 2]> {
    scale_notation(names, dims).chars().zip(scale.iter().copied()).collect()
}

/// Position in a scale of shape `scale` for element `index` of a row-major tensor of shape `x`.
pub(crate) fn position(x: &[usize], scale: &[usize], dims: &[usize], index: usize) -> usize {
    dims.iter().zip(scale).fold(0, |res, (&dim, &n)| {
        let stride: usize = x[dim + 1..].iter().product();
        let at = index / stride % x[dim];
        res * n + at / (x[dim] / n)
    })
}
