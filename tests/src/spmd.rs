//! Runs one op on every rank of a mesh, and compares with the global result.

use ir::ops::{
    Assignment, BoundAt, Factors, Linear, LocalBound, Op, Tensor, local_shape, run_reference,
};
use ir::placement::{Axis, Digit, DimLayout, Mesh, ReduceOp, Sharding};
use ir::random::Stream;
use ir::{Shape, TensorType};

use crate::eval::apply;

/// By how much results may differ, relative to numbers of order one: the op's sums of up to a few
/// hundred terms are cut and added in another order, each addition with an error of 2^-53.
pub const TOLERANCE: f64 = 1e-12;

/// One op with its global operands and results.
pub struct Case {
    /// The op.
    pub op: Op,
    /// Types of the operands.
    pub inputs: Vec<TensorType>,
    /// Types of the results.
    pub results: Vec<TensorType>,
    /// The operands.
    pub operands: Vec<Tensor<f64>>,
    /// What the op makes of them on one rank.
    pub expect: Vec<Tensor<f64>>,
    /// How dimensions correspond.
    pub factors: Factors,
}

impl Case {
    /// The op on these operands.
    pub fn new(op: impl Into<Op>, inputs: Vec<TensorType>, operands: Vec<Tensor<f64>>) -> Case {
        let op = op.into();
        let types: Vec<&TensorType> = inputs.iter().collect();
        let results = op.infer(&types).unwrap_or_else(|it| panic!("{}: {it}", op.to_text()));
        let results = results.into_vec();
        let factors = op.factors(&types, &results.iter().collect::<Vec<_>>());
        let expect = apply(&op, &operands, &types);
        Case { op, inputs, results, operands, expect, factors }
    }

    /// Every legal way to lay out the op's factors: each axis of the mesh shards one of them (as
    /// it is, or each half of it), carries a partial sum, or does nothing; in any order where two
    /// axes shard one factor.
    pub fn assignments(&self, mesh: &Mesh) -> Vec<Assignment> {
        let mut res = vec![self.factors.nothing()];
        for axis in mesh.axes() {
            let mut next = Vec::new();
            for before in res {
                if self.factors.linear == Linear::Joint {
                    let mut with = before.clone();
                    with.partial = with.partial.with(axis);
                    next.push(with);
                }
                for factor in 0..self.factors.factors.len() {
                    let old = before.layouts[factor].digits();
                    for blocks in [1, 2] {
                        let new = [Digit::Block(blocks), Digit::Axis(axis)];
                        let mut with = before.clone();
                        with.layouts[factor] =
                            DimLayout::new(old.iter().copied().chain(new).collect::<Vec<_>>());
                        next.push(with.clone());
                        if !old.is_empty() {
                            with.layouts[factor] =
                                DimLayout::new(new.iter().chain(old).copied().collect::<Vec<_>>());
                            next.push(with);
                        }
                    }
                }
                next.push(before);
            }
            res = next;
        }
        res.retain(|it| self.is_legal(it, mesh));
        res
    }

    fn is_legal(&self, assignment: &Assignment, mesh: &Mesh) -> bool {
        let inputs = 0..self.inputs.len();
        let results = 0..self.results.len();
        self.factors.check(assignment, mesh).is_ok()
            && inputs.into_iter().all(|it| self.factors.input(it, assignment, mesh).is_some())
            && results.into_iter().all(|it| self.factors.result(it, assignment, mesh).is_some())
    }

    /// Runs the op on every rank.
    pub fn run(&self, assignment: &Assignment, mesh: &Mesh) -> Run {
        let legal = "the assignment is legal";
        let inputs = 0..self.inputs.len();
        let inputs: Vec<Sharding> =
            inputs.map(|it| self.factors.input(it, assignment, mesh).expect(legal)).collect();
        let results = 0..self.results.len();
        let results: Vec<Sharding> =
            results.map(|it| self.factors.result(it, assignment, mesh).expect(legal)).collect();
        let shapes: Vec<Shape> = results
            .iter()
            .zip(&self.results)
            .map(|(sharding, ty)| sharding.local_shape(&ty.shape, mesh))
            .collect();
        let views: Vec<&[u64]> = shapes.iter().map(|it| it.as_slice()).collect();
        let op = self.op.localize(&views).unwrap_or_else(|| self.op.clone());
        let shapes: Vec<_> = shapes.iter().map(|it| local_shape(it)).collect();
        let parts: Vec<Vec<Tensor<f64>>> = self
            .operands
            .iter()
            .zip(&inputs)
            .map(|(operand, sharding)| parts(operand, mesh.set_size(sharding.partial_axes())))
            .collect();
        let ranks = mesh.coords().map(|coord| {
            let operands: Vec<Tensor<f64>> = (parts.iter().zip(&inputs).zip(&self.inputs))
                .map(|((parts, sharding), ty)| {
                    let part = mesh.index_in(sharding.partial_axes(), &coord);
                    cut(&parts[part as usize], &ty.shape, sharding, mesh, &coord)
                })
                .collect();
            let types: Vec<&TensorType> = self.inputs.iter().collect();
            let bounds = self.op.bounds(&types);
            let bounds: Vec<LocalBound> = bounds
                .iter()
                .map(|at| {
                    let (layout, size) = match *at {
                        BoundAt::Input(i, dim) => (&inputs[i].dims[dim], self.inputs[i].shape[dim]),
                        BoundAt::Result(i, dim) => {
                            (&results[i].dims[dim], self.results[i].shape[dim])
                        }
                    };
                    let (start, extent) =
                        (layout.start(size, mesh, &coord), layout.extent(size, mesh, &coord));
                    LocalBound { start, extent, size }
                })
                .collect();
            run_reference(&op, &operands, &shapes, &bounds)
        });
        Run { ranks: ranks.collect(), results }
    }

    /// Asserts that ranks laid out like this compute the global results, and zeros as padding.
    #[track_caller]
    pub fn check(&self, assignment: &Assignment, mesh: &Mesh) {
        let run = self.run(assignment, mesh);
        for (index, (ty, expect)) in self.results.iter().zip(&self.expect).enumerate() {
            let sharding = &run.results[index];
            let what = |coord: &[u32]| {
                format!(
                    "{} result {index} at {coord:?} of {:?}: {}",
                    self.op.to_text(),
                    mesh.user_axes(),
                    sharding.display(mesh)
                )
            };
            for coord in mesh.coords() {
                let expect = cut(expect, &ty.shape, sharding, mesh, &coord);
                let raw = &run.ranks[mesh.rank_of(&coord) as usize][index];
                let valid = positions(&ty.shape, sharding, mesh, &coord);
                let mut padding = raw.data.clone();
                valid.iter().for_each(|at| padding[at.1] = 0.0);
                assert!(padding.iter().all(|&it| it == 0.0), "padding of {}", what(&coord));
                let value = run.reduced(index, mesh, &coord);
                for (_, at) in valid {
                    let (value, expect) = (value.data[at], expect.data[at]);
                    assert!(close(value, expect), "{}: {value}, not {expect}", what(&coord));
                }
            }
        }
    }
}

/// What an op made on every rank.
pub struct Run {
    /// Results of each rank.
    pub ranks: Vec<Vec<Tensor<f64>>>,
    /// Where they live.
    pub results: Vec<Sharding>,
}

impl Run {
    /// Result `index` at `coord`, after the reduction that its sharding implies.
    pub fn reduced(&self, index: usize, mesh: &Mesh, coord: &[u32]) -> Tensor<f64> {
        let partial = self.results[index].partial;
        let axes = self.results[index].partial_axes();
        let mut group = mesh.group_of(axes, coord);
        let value = |coord: &[u32]| &self.ranks[mesh.rank_of(coord) as usize][index];
        let first = group.next().expect("a group has a member");
        let mut res = value(&first).clone();
        for other in group {
            for (a, &b) in res.data.iter_mut().zip(&value(&other).data) {
                match partial.expect("a group of several has a reduction").0 {
                    ReduceOp::Sum => *a += b,
                    ReduceOp::Max => *a = a.max(b),
                    ReduceOp::Avg | ReduceOp::Min => unreachable!("no op makes one"),
                }
            }
        }
        res
    }
}

/// Whether two numbers are the same but for rounding.
pub fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= TOLERANCE * b.abs().max(1.0) || a == b
}

/// The layout in which `axis` cuts a dimension.
pub fn over(axis: u8) -> DimLayout {
    DimLayout::over([Axis(axis)])
}

/// `n` tensors whose sum is `whole`.
fn parts(whole: &Tensor<f64>, n: u64) -> Vec<Tensor<f64>> {
    let mut last = whole.clone();
    let mut res = Vec::new();
    for part in 1..n {
        let stream = Stream { seed: 7, key: part };
        let mut random = whole.clone();
        for (i, (part, rest)) in random.data.iter_mut().zip(&mut last.data).enumerate() {
            *part = stream.uniform(i as u64);
            *rest -= *part;
        }
        res.push(random);
    }
    res.push(last);
    res
}

/// Global and local position of every element that a rank holds.
fn positions(
    shape: &[u64],
    sharding: &Sharding,
    mesh: &Mesh,
    coord: &[u32],
) -> Vec<(usize, usize)> {
    let local = sharding.local_shape(shape, mesh);
    let mut res = vec![(0, 0)];
    for ((layout, &size), &local) in sharding.dims.iter().zip(shape).zip(&local) {
        let runs = layout.runs(size, mesh, coord);
        let rows: Vec<u64> = runs.iter().flat_map(|&(start, len)| start..start + len).collect();
        res = res
            .iter()
            .flat_map(|&(global, at)| {
                let rows = rows.iter().enumerate();
                rows.map(move |(i, &row)| {
                    (global * size as usize + row as usize, at * local as usize + i)
                })
            })
            .collect();
    }
    res
}

/// The buffer of one rank: what it holds of a global tensor, then zeros.
fn cut(
    global: &Tensor<f64>,
    shape: &[u64],
    sharding: &Sharding,
    mesh: &Mesh,
    coord: &[u32],
) -> Tensor<f64> {
    let mut res = Tensor::zeros(&local_shape(&sharding.local_shape(shape, mesh)));
    for (from, to) in positions(shape, sharding, mesh, coord) {
        res.data[to] = global.data[from];
    }
    res
}
