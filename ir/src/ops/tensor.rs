//! Host tensors for references: views of row-major data, and an owned tensor for tests.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Numbers that a reference computes with: `f32` at run time, `f64` to check gradients.
pub trait Real:
    num_traits::Float + num_traits::NumAssign + std::iter::Sum + fmt::Debug + Send + Sync + 'static
{
    /// Nearest value of this type.
    fn from_f64(x: f64) -> Self;
    /// The same number.
    fn to_f64(self) -> f64;
}

impl Real for f32 {
    fn from_f64(x: f64) -> f32 {
        x as f32
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Real for f64 {
    fn from_f64(x: f64) -> f64 {
        x
    }
    fn to_f64(self) -> f64 {
        self
    }
}

/// An operand: row-major elements of one rank.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T> {
    /// Local sizes.
    pub shape: &'a [usize],
    /// Elements.
    pub data: &'a [T],
}

/// A result to be written; its content is undefined before.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    /// Local sizes.
    pub shape: &'a [usize],
    /// Elements.
    pub data: &'a mut [T],
}

impl<T: Real> View<'_, T> {
    /// Size of the last dimension; 1 for a scalar.
    pub fn last(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Element `i` as an integer.
    pub fn int(&self, i: usize) -> i64 {
        self.data[i].to_f64() as i64
    }
}

impl<T> ViewMut<'_, T> {
    /// Size of the last dimension; 1 for a scalar.
    pub fn last(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

/// An owned row-major tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor<T> {
    /// Sizes.
    pub shape: SmallVec<[usize; 4]>,
    /// Elements.
    pub data: Vec<T>,
}

impl<T: Real> Tensor<T> {
    /// All zero.
    pub fn zeros(shape: &[usize]) -> Tensor<T> {
        let data = vec![T::zero(); shape.iter().product()];
        Tensor { shape: SmallVec::from_slice(shape), data }
    }

    /// A view of it.
    pub fn view(&self) -> View<'_, T> {
        View { shape: &self.shape, data: &self.data }
    }

    /// A view to write through.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { shape: &self.shape, data: &mut self.data }
    }
}

/// A float attribute: compared and hashed by its bits, so that ops are `Eq` and `Hash`.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Number(pub f64);

impl PartialEq for Number {
    fn eq(&self, other: &Number) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Number {}

impl Hash for Number {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

impl From<f64> for Number {
    fn from(it: f64) -> Number {
        Number(it)
    }
}

impl From<Number> for f64 {
    fn from(it: Number) -> f64 {
        it.0
    }
}

/// The inner product of two vectors of one length, in a fixed order: eight interleaved sums.
pub(crate) fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::zero(); 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let tail: T = a8.remainder().iter().zip(b8.remainder()).map(|(&x, &y)| x * y).sum();
    for (a, b) in a8.zip(b8) {
        for i in 0..8 {
            lanes[i] += a[i] * b[i];
        }
    }
    lanes.into_iter().sum::<T>() + tail
}

/// Adds `factor * x` to `out`.
pub(crate) fn axpy<T: Real>(out: &mut [T], factor: T, x: &[T]) {
    for (out, &x) in out.iter_mut().zip(x) {
        *out += factor * x;
    }
}
