//! Runs references on tensors of their own: for tests, and to check kernels.

use smallvec::SmallVec;

use crate::ops::{BoundAt, LocalBound, LocalCx, Op, Real, SampleInput, Tensor, TypeError, Values};
use crate::random::Stream;
use crate::types::TensorType;

impl SampleInput {
    /// Random content; other numbers for other seeds.
    pub fn tensor<T: Real>(&self, seed: u64) -> Tensor<T> {
        let stream = Stream { seed, key: 0 };
        let value = |i: u64| match self.values {
            Values::Random => 2.0 * stream.uniform(i) - 1.0,
            Values::Positive => 0.5 + stream.uniform(i),
            Values::One => 1.0,
            Values::Zero => 0.0,
            Values::Ids(n) => f64::from(stream.word(i) % n),
        };
        let data = (0..self.ty.n_elements()).map(|it| T::from_f64(value(it))).collect();
        Tensor { shape: local_shape(&self.ty.shape), data }
    }
}

/// The op's reference on global operands. Results start as no numbers, so that what the op does
/// not write shows.
pub fn apply<T: Real>(
    op: &Op,
    inputs: &[Tensor<T>],
    types: &[&TensorType],
) -> Result<Vec<Tensor<T>>, TypeError> {
    let results = op.infer(types)?;
    let shapes: Vec<_> = results.iter().map(|it| local_shape(&it.shape)).collect();
    Ok(run_reference(op, inputs, &shapes, &bounds_of_whole(op, types, &results)))
}

/// The bounds of an op where one rank holds everything.
pub fn bounds_of_whole(op: &Op, types: &[&TensorType], results: &[TensorType]) -> Vec<LocalBound> {
    let bound = |at: &BoundAt| {
        let size = match *at {
            BoundAt::Input(operand, dim) => types[operand].shape[dim],
            BoundAt::Result(result, dim) => results[result].shape[dim],
        };
        LocalBound { start: 0, extent: size, size }
    };
    op.bounds(types).iter().map(bound).collect()
}

/// The op's reference on operands of one rank, with results of these shapes.
pub fn run_reference<T: Real>(
    op: &Op,
    inputs: &[Tensor<T>],
    shapes: &[SmallVec<[usize; 4]>],
    bounds: &[LocalBound],
) -> Vec<Tensor<T>> {
    let mut res: Vec<Tensor<T>> = shapes
        .iter()
        .map(|shape| Tensor { shape: shape.clone(), data: vec![T::nan(); shape.iter().product()] })
        .collect();
    let views: Vec<_> = inputs.iter().map(Tensor::view).collect();
    let mut results: Vec<_> = res.iter_mut().map(Tensor::view_mut).collect();
    op.reference(&views, &mut results, &LocalCx { bounds });
    res
}

/// Sizes as the references take them.
pub fn local_shape(shape: &[u64]) -> SmallVec<[usize; 4]> {
    shape.iter().map(|&it| it as usize).collect()
}
