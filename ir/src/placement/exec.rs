//! Moving elements by global index: what one coordinate holds that another wants.
//!
//! Every step of [`reshard`](super::reshard()) means the same thing, whatever its kind: each
//! coordinate gets what its new layout says, from the coordinates that differ from it only over the
//! axes of the step. [`apply_step`] is that sentence as code, for any sizes. It is the reference
//! for the collectives of the runtime, which are built on [`copy_runs`] as well.

use smallvec::SmallVec;

use super::layout::DimLayout;
use super::mesh::{AxisSet, Mesh};
use super::reshard::{Step, StepKind};
use super::sharding::{ReduceOp, Sharding};

/// A stretch of one dimension to copy: where it starts locally in the source and in the
/// destination, and its length.
pub type CopyRun = (u64, u64, u64);

/// The stretches of one dimension to copy, in ascending order.
pub type CopyRuns = SmallVec<[CopyRun; 2]>;

/// What `src_coord` holds of one dimension that `dst_coord` wants, in local positions.
///
/// ```text
/// 8 rows, [tp] at tp=1 of 2 (4..8)  to  [x2.tp] at tp=0 (0 1, 4 5)  ->  (0, 2, 2)
/// ```
pub fn copy_runs(
    src_layout: &DimLayout,
    dst_layout: &DimLayout,
    size: u64,
    mesh: &Mesh,
    src_coord: &[u32],
    dst_coord: &[u32],
) -> CopyRuns {
    let src = src_layout.runs(size, mesh, src_coord);
    let dst = dst_layout.runs(size, mesh, dst_coord);
    let mut res = CopyRuns::new();
    let (mut i, mut j) = (0, 0);
    // Local positions where the current runs start.
    let (mut src_at, mut dst_at) = (0, 0);
    while let (Some(&(src_start, src_len)), Some(&(dst_start, dst_len))) = (src.get(i), dst.get(j))
    {
        let (src_end, dst_end) = (src_start + src_len, dst_start + dst_len);
        let (start, end) = (src_start.max(dst_start), src_end.min(dst_end));
        if start < end {
            res.push((src_at + start - src_start, dst_at + start - dst_start, end - start));
        }
        if src_end <= dst_end {
            src_at += src_len;
            i += 1;
        } else {
            dst_at += dst_len;
            j += 1;
        }
    }
    res
}

/// Calls `copy` with source offset, destination offset and length, in elements, of every
/// contiguous stretch of the boxes that `runs` names, one entry per dimension.
///
/// Shapes are those of the buffers (row-major); what the runs do not name is not touched.
pub fn for_each_copy(
    src_shape: &[u64],
    dst_shape: &[u64],
    runs: &[CopyRuns],
    mut copy: impl FnMut(u64, u64, u64),
) {
    fn walk(
        src_shape: &[u64],
        dst_shape: &[u64],
        runs: &[CopyRuns],
        (src, dst): (u64, u64),
        copy: &mut impl FnMut(u64, u64, u64),
    ) {
        let Some((first, rest)) = runs.split_first() else { return copy(src, dst, 1) };
        if rest.is_empty() {
            return first.iter().for_each(|&(s, d, len)| copy(src + s, dst + d, len));
        }
        let src_stride: u64 = src_shape[1..].iter().product();
        let dst_stride: u64 = dst_shape[1..].iter().product();
        // Rows that are whole in both buffers are one stretch.
        let whole = src_shape[1..].iter().zip(&dst_shape[1..]).zip(rest);
        if whole.clone().all(|((&s, &d), runs)| s == d && runs.as_slice() == [(0, 0, s)]) {
            return first.iter().for_each(|&(s, d, len)| {
                copy(src + s * src_stride, dst + d * dst_stride, len * src_stride);
            });
        }
        for &(s, d, len) in first {
            for i in 0..len {
                let at = (src + (s + i) * src_stride, dst + (d + i) * dst_stride);
                walk(&src_shape[1..], &dst_shape[1..], rest, at, copy);
            }
        }
    }
    walk(src_shape, dst_shape, runs, (0, 0), &mut copy);
}

/// What every rank holds after a step, from what every rank holds before it, in rank order.
///
/// Local data is compact: the valid elements only, row-major, without padding.
///
/// # Panics
///
/// If `locals` is not what `from` says the ranks hold, or if the step does not bring every element
/// that its layout wants from inside its group exactly once, which would be a bug of `reshard`.
pub fn apply_step(
    step: &Step,
    from: &Sharding,
    shape: &[u64],
    mesh: &Mesh,
    locals: &[Vec<f64>],
) -> Vec<Vec<f64>> {
    let axes = step.kind.axes();
    let reduced = from.partial_axes().minus(step.to.partial_axes());
    let moved = match step.kind {
        StepKind::Slice { .. } | StepKind::ToPartial { .. } => AxisSet::EMPTY,
        _ => axes.minus(reduced),
    };
    let op = from.partial.map(|(op, _)| op);
    let mut res = Vec::with_capacity(locals.len());
    for coord in mesh.coords() {
        let mut acc: Option<Vec<f64>> = None;
        for part in mesh.group_of(reduced, &coord) {
            let value = collect(step, from, shape, mesh, locals, (moved, &part, &coord));
            acc = Some(match (acc, op) {
                (Some(acc), Some(op)) => reduce(op, acc, &value),
                _ => value,
            });
        }
        let mut local = acc.expect("a group has at least one coordinate");
        if op == Some(ReduceOp::Avg) {
            let n = mesh.set_size(reduced) as f64;
            local.iter_mut().for_each(|it| *it /= n);
        }
        let zeroed = matches!(step.kind, StepKind::ToPartial { op: ReduceOp::Sum, .. });
        if zeroed && mesh.index_in(axes, &coord) != 0 {
            local.fill(0.0);
        }
        res.push(local);
    }
    res
}

/// What every rank holds after all of `steps`.
///
/// # Panics
///
/// As [`apply_step`].
pub fn apply_steps(
    steps: &[Step],
    from: &Sharding,
    shape: &[u64],
    mesh: &Mesh,
    locals: Vec<Vec<f64>>,
) -> Vec<Vec<f64>> {
    let mut at = from;
    steps.iter().fold(locals, |locals, step| {
        let res = apply_step(step, at, shape, mesh, &locals);
        at = &step.to;
        res
    })
}

/// What `dst` wants, from the coordinates that differ from `part` over `moved`.
fn collect(
    step: &Step,
    from: &Sharding,
    shape: &[u64],
    mesh: &Mesh,
    locals: &[Vec<f64>],
    (moved, part, dst): (AxisSet, &[u32], &[u32]),
) -> Vec<f64> {
    let dst_shape = step.to.extents(shape, mesh, dst);
    let n: u64 = dst_shape.iter().product();
    let mut res = vec![0.0; n as usize];
    let mut copied = 0;
    for src in mesh.group_of(moved, part) {
        let src_shape = from.extents(shape, mesh, &src);
        let local = &locals[mesh.rank_of(&src) as usize];
        assert_eq!(
            local.len() as u64,
            src_shape.iter().product::<u64>(),
            "locals do not fit the layout"
        );
        let dims = from.dims.iter().zip(&step.to.dims).zip(shape);
        let runs: SmallVec<[CopyRuns; 4]> =
            dims.map(|((from, to), &size)| copy_runs(from, to, size, mesh, &src, dst)).collect();
        for_each_copy(&src_shape, &dst_shape, &runs, |src, dst, len| {
            let (src, dst, len) = (src as usize, dst as usize, len as usize);
            res[dst..dst + len].copy_from_slice(&local[src..src + len]);
            copied += len as u64;
        });
    }
    assert_eq!(copied, n, "the group of {:?} does not hold what {dst:?} wants once", step.kind);
    res
}

fn reduce(op: ReduceOp, mut acc: Vec<f64>, value: &[f64]) -> Vec<f64> {
    for (acc, &value) in acc.iter_mut().zip(value) {
        *acc = match op {
            ReduceOp::Sum | ReduceOp::Avg => *acc + value,
            ReduceOp::Max => acc.max(value),
            ReduceOp::Min => acc.min(value),
        };
    }
    acc
}
