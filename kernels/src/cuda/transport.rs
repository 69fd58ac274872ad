//! How a collective runs on GPUs: which calls of NCCL carry it, and what is packed before and unpacked
//! after them.
//!
//! [`transport`] follows from shardings and the mesh alone, so that a planner knows how much workspace
//! a collective needs; [`movement`] is the same for one coordinate, with addresses.
//!
//! ```text
//! all-reduce                                 one call, straight from source to destination
//! all-gather of even pieces                  one call for each row in front of the gathered dim
//! all-gather otherwise                       whole buffers into the workspace, then boxes from there
//! reduce-scatter of even pieces              one call for each row
//! reduce-scatter otherwise                   boxes into the workspace, with zero padding, then one call
//! all-to-all, permute                        pieces to and from each peer; packed where they are not
//!                                            contiguous
//! slice, to-partial, a group of one          boxes, or zeros
//! ```
//!
//! A part that adds to its destination arrives in the workspace, and one kernel adds it from there.
//! NCCL sums in the element type; what is padding stays zero in all of them.

use ir::ops::CollectiveKind;
use ir::placement::{AxisSet, Coord, CopyRuns, Digit, Mesh, ReduceOp, Sharding, copy_runs};
use ir::plan::{self, Comm, Plan};
use ir::{DType, TensorType};
use smallvec::SmallVec;

use crate::cuda::boxes::{Boxes, CopyBox, copy_boxes};
use crate::cuda::{Pointer, Program, Work, add};

pub use crate::cuda::boxes::functions;

/// The most rows that are carried by calls of their own.
const ROWS_MAX: u64 = 64;

/// Regions of a workspace are aligned to this.
const ALIGN: u64 = 256;

/// One tensor of a collective.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// Element type and global shape, on both sides.
    pub ty: &'a TensorType,
    /// Where elements are.
    pub from: &'a Sharding,
    /// Where they go.
    pub to: &'a Sharding,
    /// True if they are added to the content of the destination.
    pub adds: bool,
}

/// How a part moves; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Within each rank.
    Local,
    /// One all-reduce.
    AllReduce {
        /// Elements of a rank.
        elements: u64,
    },
    /// All-gathers in place.
    AllGather {
        /// How many calls.
        rows: u64,
        /// Bytes that each rank gives in a call.
        bytes: u64,
    },
    /// One all-gather into the workspace.
    GatherUnpack {
        /// Bytes that each rank gives.
        bytes: u64,
        /// Ranks of a group.
        ranks: u64,
    },
    /// Reduce-scatters in place.
    ReduceScatter {
        /// How many calls.
        rows: u64,
        /// Elements that each rank gets in a call.
        elements: u64,
    },
    /// One reduce-scatter from the workspace.
    PackScatter {
        /// Elements that each rank gets.
        elements: u64,
        /// Bytes of them.
        bytes: u64,
        /// Ranks of a group.
        ranks: u64,
    },
    /// Pieces from each rank to each.
    Exchange {
        /// Bytes that a rank sends at most.
        send: u64,
        /// Bytes that a rank gets at most.
        receive: u64,
    },
}

/// What one rank does for a collective: three things in order on one stream, with one workspace that
/// keeps its content in between.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Movement {
    /// First.
    pub before: Program,
    /// Then these, in one group call. None where nothing leaves the rank.
    pub transfers: Vec<Transfer>,
    /// At last.
    pub after: Program,
    /// Bytes of workspace.
    pub workspace: u64,
}

/// A byte of a buffer or of the workspace. [`Pointer::Arg`] and [`Pointer::Result`] count the parts.
pub type Place = (Pointer, u64);

/// A call of NCCL. Peers are indices in the group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Transfer {
    /// `ncclAllReduce`.
    AllReduce {
        /// Source.
        from: Place,
        /// Destination.
        to: Place,
        /// How many elements.
        elements: u64,
        /// Of which type.
        dtype: DType,
        /// The reduction.
        op: ReduceOp,
    },
    /// `ncclAllGather`.
    AllGather {
        /// Source.
        from: Place,
        /// Destination.
        to: Place,
        /// Bytes of each rank.
        bytes: u64,
    },
    /// `ncclReduceScatter`.
    ReduceScatter {
        /// Source.
        from: Place,
        /// Destination.
        to: Place,
        /// Elements that each rank gets.
        elements: u64,
        /// Of which type.
        dtype: DType,
        /// The reduction.
        op: ReduceOp,
    },
    /// `ncclBroadcast`, in place.
    Broadcast {
        /// What it is on the root, and will be on all.
        place: Place,
        /// Who has it.
        root: u64,
        /// How much.
        bytes: u64,
    },
    /// `ncclSend`.
    Send {
        /// Source.
        from: Place,
        /// To whom.
        peer: u32,
        /// How many bytes.
        bytes: u64,
    },
    /// `ncclRecv`.
    Receive {
        /// Destination.
        to: Place,
        /// From whom.
        peer: u32,
        /// How many bytes.
        bytes: u64,
    },
}

impl Transport {
    /// Bytes of workspace that it needs on a rank.
    pub fn workspace(self) -> u64 {
        match self {
            Transport::Local
            | Transport::AllReduce { .. }
            | Transport::AllGather { .. }
            | Transport::ReduceScatter { .. } => 0,
            Transport::GatherUnpack { bytes, ranks }
            | Transport::PackScatter { bytes, ranks, .. } => align(bytes * ranks),
            Transport::Exchange { send, receive } => align(send) + align(receive),
        }
    }
}

/// As [`workspace`], of a plan's collective.
pub fn workspace_of(plan: &Plan, kind: CollectiveKind, comm: Comm, parts: &[plan::Part]) -> u64 {
    let part = |it: &plan::Part| {
        let (src, dst) = (&plan.buffers[it.src], &plan.buffers[it.dst]);
        Part { ty: &src.ty, from: &src.sharding, to: &dst.sharding, adds: it.adds }
    };
    workspace(kind, plan.comms[comm], parts.iter().map(part), &plan.mesh)
}

/// Bytes of workspace that a collective needs on each rank.
pub fn workspace<'a>(
    kind: CollectiveKind,
    axes: AxisSet,
    parts: impl IntoIterator<Item = Part<'a>>,
    mesh: &Mesh,
) -> u64 {
    let of = |it| transport(kind, axes, it, mesh).workspace() + added(it, mesh);
    parts.into_iter().map(of).sum()
}

/// Bytes of workspace for what arrives to be added.
fn added(part: Part<'_>, mesh: &Mesh) -> u64 {
    let bytes = local_elements(part.to, part.ty, mesh) * part.ty.dtype.bytes();
    if part.adds { align(bytes) } else { 0 }
}

/// How one part of a collective over `axes` moves.
pub fn transport(kind: CollectiveKind, axes: AxisSet, part: Part<'_>, mesh: &Mesh) -> Transport {
    let ranks = mesh.set_size(axes);
    let size = part.ty.dtype.bytes();
    let [from, to] = [part.from, part.to].map(|it| local_elements(it, part.ty, mesh));
    if kind.is_local() || ranks == 1 || from == 0 || to == 0 {
        return Transport::Local;
    }
    match kind {
        CollectiveKind::Slice | CollectiveKind::ToPartial(_) => Transport::Local,
        CollectiveKind::AllReduce(_) => Transport::AllReduce { elements: from },
        CollectiveKind::AllGather => match even_rows(part.from, part.to, axes, part.ty, mesh) {
            Some(rows) => Transport::AllGather { rows, bytes: from / rows * size },
            None => Transport::GatherUnpack { bytes: from * size, ranks },
        },
        CollectiveKind::ReduceScatter(_) => {
            match even_rows(part.to, part.from, axes, part.ty, mesh) {
                Some(rows) => Transport::ReduceScatter { rows, elements: to / rows },
                None => Transport::PackScatter { elements: to, bytes: to * size, ranks },
            }
        }
        CollectiveKind::AllToAll | CollectiveKind::Permute => {
            // Each element goes to all that hold the same afterwards.
            let copies = mesh.set_size(axes.minus(part.to.sharded_axes()));
            let send = from.saturating_mul(copies).min(ranks * from.min(to));
            Transport::Exchange { send: send * size, receive: to * size }
        }
    }
}

fn local_elements(sharding: &Sharding, ty: &TensorType, mesh: &Mesh) -> u64 {
    sharding.local_shape(&ty.shape, mesh).iter().product()
}

fn align(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGN)
}

/// If `cut` is `whole` with one dimension cut further over `axes`, evenly and in rank order: the number
/// of rows in front of that dimension, unless they are many.
fn even_rows(
    cut: &Sharding,
    whole: &Sharding,
    axes: AxisSet,
    ty: &TensorType,
    mesh: &Mesh,
) -> Option<u64> {
    let cuts = |&digit: &Digit| !matches!(digit, Digit::Axis(it) if mesh.size(it) == 1);
    let digits = |it: &Sharding, dim: usize| -> SmallVec<[Digit; 4]> {
        it.dims[dim].digits().iter().copied().filter(cuts).collect()
    };
    let ndim = ty.shape.len();
    let mut differing = (0..ndim).filter(|&it| digits(cut, it) != digits(whole, it));
    let dim = differing.next()?;
    let even = cut.dims[dim].divides(ty.shape[dim], mesh);
    // With blocks, what is cut is not one range.
    if differing.next().is_some() || !even || !cut.dims[dim].is_contiguous() {
        return None;
    }
    let mut expect = digits(whole, dim);
    expect.extend(axes.iter().map(Digit::Axis).filter(cuts));
    let rows: u64 = cut.local_shape(&ty.shape, mesh)[..dim].iter().product();
    (digits(cut, dim) == expect && rows <= ROWS_MAX).then_some(rows)
}

/// What the rank at `coord` does for a collective over `axes`. `Err` says what is wrong with the plan.
pub fn movement(
    kind: CollectiveKind,
    axes: AxisSet,
    parts: &[Part<'_>],
    mesh: &Mesh,
    coord: &[u32],
) -> Result<Movement, String> {
    let mut res = Maker::new(kind, axes, mesh, coord);
    for (index, &part) in parts.iter().enumerate() {
        res.add(index as u32, part)?;
    }
    Ok(res.finish())
}

/// A movement in the making.
struct Maker<'a> {
    kind: CollectiveKind,
    axes: AxisSet,
    mesh: &'a Mesh,
    coord: &'a [u32],
    /// Memory to set to zero, before all boxes.
    zeros: Vec<Work>,
    before: Boxes,
    transfers: Vec<Transfer>,
    after: Boxes,
    /// Kernels that add the received data to the sums, after all transfers.
    adds: Vec<Work>,
    /// Bytes of the workspace that are taken.
    workspace: u64,
}

/// A part with what is derived from it.
struct Sides<'a> {
    part: Part<'a>,
    from: SmallVec<[u64; 4]>,
    to: SmallVec<[u64; 4]>,
    src: Pointer,
    dst: Pointer,
    /// Bytes of an element.
    size: u64,
}

impl<'a> Maker<'a> {
    fn new(kind: CollectiveKind, axes: AxisSet, mesh: &'a Mesh, coord: &'a [u32]) -> Maker<'a> {
        Maker {
            kind,
            axes,
            mesh,
            coord,
            zeros: Vec::new(),
            before: Boxes::default(),
            transfers: Vec::new(),
            after: Boxes::default(),
            adds: Vec::new(),
            workspace: 0,
        }
    }

    fn add(&mut self, index: u32, part: Part<'_>) -> Result<(), String> {
        self.check(part)?;
        let mut dst = Pointer::Result(index);
        if part.adds {
            let (sum, n) = (dst, local_elements(part.to, part.ty, self.mesh));
            dst = Pointer::Workspace(self.workspace);
            self.workspace += added(part, self.mesh);
            self.adds.extend((n > 0).then(|| add::onto(part.ty.dtype, n, sum, dst)));
        }
        let local = |it: &Sharding| it.local_shape(&part.ty.shape, self.mesh);
        let sides = Sides {
            part,
            from: local(part.from),
            to: local(part.to),
            src: Pointer::Arg(index),
            dst,
            size: part.ty.dtype.bytes(),
        };
        let transport = transport(self.kind, self.axes, part, self.mesh);
        let base = self.workspace;
        self.workspace += transport.workspace();
        match transport {
            Transport::Local => self.local(&sides),
            Transport::AllReduce { elements } => {
                let (from, to) = ((sides.src, 0), (sides.dst, 0));
                let (dtype, op) = (part.ty.dtype, self.reduction());
                self.transfers.push(Transfer::AllReduce { from, to, elements, dtype, op });
            }
            Transport::AllGather { rows, bytes } => {
                let ranks = self.mesh.set_size(self.axes);
                self.transfers.extend((0..rows).map(|row| Transfer::AllGather {
                    from: (sides.src, row * bytes),
                    to: (sides.dst, row * bytes * ranks),
                    bytes,
                }));
            }
            Transport::GatherUnpack { bytes, .. } => self.gather(&sides, base, bytes),
            Transport::ReduceScatter { rows, elements } => {
                let (ranks, op) = (self.mesh.set_size(self.axes), self.reduction());
                let bytes = elements * sides.size;
                self.transfers.extend((0..rows).map(|row| Transfer::ReduceScatter {
                    from: (sides.src, row * bytes * ranks),
                    to: (sides.dst, row * bytes),
                    elements,
                    dtype: part.ty.dtype,
                    op,
                }));
            }
            Transport::PackScatter { elements, bytes, .. } => {
                self.scatter(&sides, base, elements, bytes);
            }
            Transport::Exchange { send, .. } => self.exchange(&sides, base, base + align(send)),
        }
        Ok(())
    }

    /// Reductions are what NCCL has: over all of a group, of one tensor.
    fn check(&self, part: Part<'_>) -> Result<(), String> {
        let cleared = part.from.partial_axes().minus(part.to.partial_axes());
        let over =
            |it: AxisSet| it.iter().filter(|&it| self.mesh.size(it) > 1).collect::<AxisSet>();
        let fits = match self.kind {
            CollectiveKind::AllReduce(_) => {
                over(cleared) == over(self.axes) && part.from.dims == part.to.dims
            }
            CollectiveKind::ReduceScatter(_) => {
                over(cleared) == over(self.axes)
                    && over(part.from.sharded_axes().intersect(self.axes)).is_empty()
            }
            CollectiveKind::AllGather
            | CollectiveKind::AllToAll
            | CollectiveKind::Permute
            | CollectiveKind::Slice
            | CollectiveKind::ToPartial(_) => cleared.is_empty(),
        };
        match fits {
            true => Ok(()),
            false => Err(format!(
                "reduces from {} to {} over ({}), which is no {}",
                part.from.display(self.mesh),
                part.to.display(self.mesh),
                self.mesh.names(self.axes),
                self.kind.name()
            )),
        }
    }

    fn reduction(&self) -> ReduceOp {
        self.kind.reduce().expect("only reductions are carried by calls that reduce")
    }

    /// The group, in coordinate order.
    fn group(&self) -> Vec<Coord> {
        self.mesh.group_of(self.axes, self.coord).collect()
    }

    /// Local stretches of what `src` holds that `dst` wants.
    fn runs(&self, part: Part<'_>, src: &[u32], dst: &[u32]) -> SmallVec<[CopyRuns; 4]> {
        let dims = part.from.dims.iter().zip(&part.to.dims).zip(&part.ty.shape);
        dims.map(|((from, to), &size)| copy_runs(from, to, size, self.mesh, src, dst)).collect()
    }

    /// What this rank holds that it wants itself; zeros elsewhere.
    fn local(&mut self, it: &Sides<'_>) {
        let sum = self.kind == CollectiveKind::ToPartial(ReduceOp::Sum);
        if sum && self.mesh.index_in(self.axes, self.coord) != 0 {
            return self.zero((it.dst, 0), it.to.iter().product::<u64>() * it.size);
        }
        self.zero_padding(it);
        let runs = self.runs(it.part, self.coord, self.coord);
        for part in copy_boxes(&it.from, &it.to, &runs) {
            self.before.push((it.src, 0), (it.dst, 0), &part, it.size);
        }
    }

    fn gather(&mut self, it: &Sides<'_>, base: u64, bytes: u64) {
        let (from, to) = ((it.src, 0), (Pointer::Workspace(base), 0));
        self.transfers.push(Transfer::AllGather { from, to, bytes });
        self.zero_padding(it);
        for (index, peer) in self.group().iter().enumerate() {
            let place = (Pointer::Workspace(base), index as u64 * bytes);
            for part in copy_boxes(&it.from, &it.to, &self.runs(it.part, peer, self.coord)) {
                self.after.push(place, (it.dst, 0), &part, it.size);
            }
        }
    }

    fn scatter(&mut self, it: &Sides<'_>, base: u64, elements: u64, bytes: u64) {
        let group = self.group();
        let mut packed = 0;
        for (index, peer) in group.iter().enumerate() {
            let place = (Pointer::Workspace(base), index as u64 * bytes);
            for part in copy_boxes(&it.from, &it.to, &self.runs(it.part, self.coord, peer)) {
                packed += part.elements();
                self.before.push((it.src, 0), place, &part, it.size);
            }
        }
        if packed < elements * group.len() as u64 {
            self.zero((Pointer::Workspace(base), 0), bytes * group.len() as u64);
        }
        self.transfers.push(Transfer::ReduceScatter {
            from: (Pointer::Workspace(base), 0),
            to: (it.dst, 0),
            elements,
            dtype: it.part.ty.dtype,
            op: self.reduction(),
        });
    }

    /// Pieces for each peer; `sent` and `got` are where they are in the workspace.
    fn exchange(&mut self, it: &Sides<'_>, mut sent: u64, mut got: u64) {
        self.zero_padding(it);
        for (index, peer) in self.group().iter().enumerate() {
            let (to_peer, from_peer) =
                (self.runs(it.part, self.coord, peer), self.runs(it.part, peer, self.coord));
            if peer.as_slice() == self.coord {
                for part in copy_boxes(&it.from, &it.to, &to_peer) {
                    self.before.push((it.src, 0), (it.dst, 0), &part, it.size);
                }
                continue;
            }
            let peer = index as u32;
            let (shape, runs) = packed(&to_peer, |&(s, _, n), at| (s, at, n));
            let bytes = shape.iter().product::<u64>() * it.size;
            if bytes > 0 {
                let boxes = copy_boxes(&it.from, &shape, &runs);
                let from = match &boxes[..] {
                    [one] if one.is_contiguous() => (it.src, one.from * it.size),
                    boxes => {
                        let place = (Pointer::Workspace(sent), 0);
                        let mut push = |part: &CopyBox| {
                            self.before.push((it.src, 0), place, part, it.size);
                        };
                        boxes.iter().for_each(&mut push);
                        sent += bytes;
                        place
                    }
                };
                self.transfers.push(Transfer::Send { from, peer, bytes });
            }
            let (shape, runs) = packed(&from_peer, |&(_, d, n), at| (at, d, n));
            let bytes = shape.iter().product::<u64>() * it.size;
            if bytes > 0 {
                let boxes = copy_boxes(&shape, &it.to, &runs);
                let to = match &boxes[..] {
                    [one] if one.is_contiguous() => (it.dst, one.to * it.size),
                    boxes => {
                        let place = (Pointer::Workspace(got), 0);
                        let mut push = |part: &CopyBox| {
                            self.after.push(place, (it.dst, 0), part, it.size);
                        };
                        boxes.iter().for_each(&mut push);
                        got += bytes;
                        place
                    }
                };
                self.transfers.push(Transfer::Receive { to, peer, bytes });
            }
        }
    }

    /// Sets the destination to zero if this rank does not fill it.
    fn zero_padding(&mut self, it: &Sides<'_>) {
        let held = it.part.to.extents(&it.part.ty.shape, self.mesh, self.coord);
        if held != it.to {
            self.zero((it.dst, 0), it.to.iter().product::<u64>() * it.size);
        }
    }

    fn zero(&mut self, (to, offset): Place, bytes: u64) {
        assert_eq!(offset, 0, "whole regions are set");
        if bytes > 0 {
            self.zeros.push(Work::Fill { to, bytes, value: 0 });
        }
    }

    fn finish(self) -> Movement {
        let program = || Program { workspace: self.workspace, ..Program::default() };
        let (mut before, mut after) = (program(), program());
        before.work.extend(self.zeros);
        self.before.finish(&mut before);
        self.after.finish(&mut after);
        // Nothing follows where nothing leaves the rank.
        let end = if self.transfers.is_empty() { &mut before } else { &mut after };
        end.work.extend(self.adds);
        Movement { before, transfers: self.transfers, after, workspace: self.workspace }
    }
}

/// The shape of what runs name when it lies packed, and the runs with their place there, which `place`
/// puts in.
fn packed(
    runs: &[CopyRuns],
    place: impl Fn(&(u64, u64, u64), u64) -> (u64, u64, u64),
) -> (SmallVec<[u64; 4]>, SmallVec<[CopyRuns; 4]>) {
    let mut shape = SmallVec::new();
    let dims = runs.iter().map(|runs| {
        let mut at = 0;
        let placed = runs.iter().map(|run| {
            let res = place(run, at);
            at += run.2;
            res
        });
        let placed: CopyRuns = placed.collect();
        shape.push(at);
        placed
    });
    let dims = dims.collect();
    (shape, dims)
}

#[cfg(test)]
mod tests;
