//! Where the elements of a tensor live: a layout per dimension, and what is still to be reduced.
//!
//! Written as `[tp.dp, _] sum(cp)`, with a granule as `[tp.dp%128, _]`; [`Sharding::parse`] reads what
//! [`Sharding::display`] prints.

use std::fmt;

use smallvec::{SmallVec, smallvec};

use super::PlacementError;
use super::layout::{Digit, DimLayout, Runs};
use super::mesh::{Axis, AxisSet, Coord, Mesh};

/// How partial values become the value.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their sum, divided by how many there are.
    Avg,
    /// The largest.
    Max,
    /// The smallest.
    Min,
}

/// Where the elements of one tensor live. Axes in neither field hold copies.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Sharding {
    /// How each dimension is cut.
    pub dims: SmallVec<[DimLayout; 4]>,
    /// The axes over which what is held must still be reduced to become the value.
    pub partial: Option<(ReduceOp, AxisSet)>,
}

/// One contiguous box of the global tensor.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Chunk {
    /// Its first element.
    pub offsets: SmallVec<[u64; 4]>,
    /// How many elements it has in each dimension; none is 0.
    pub sizes: SmallVec<[u64; 4]>,
}

/// A box of the global tensor, and where it lies in a buffer that holds it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LocalBox {
    /// The box.
    pub chunk: Chunk,
    /// Its first element in the buffer; its sizes there are the same.
    pub at: SmallVec<[u64; 4]>,
}

impl ReduceOp {
    /// All of them.
    pub const ALL: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min];

    /// Its name in text: `sum`, `avg`, `max` or `min`.
    pub fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        }
    }

    /// A noun for the result: `sum`, `average`, `maximum` or `minimum`.
    pub fn noun(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "average",
            ReduceOp::Max => "maximum",
            ReduceOp::Min => "minimum",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Sharding {
    /// Whole on every coordinate.
    pub fn replicated(ndim: usize) -> Sharding {
        Sharding { dims: smallvec![DimLayout::whole(); ndim], partial: None }
    }

    /// The number of dimensions.
    pub fn ndim(&self) -> usize {
        self.dims.len()
    }

    /// The largest shape that any coordinate holds, which is the shape of its buffer.
    pub fn local_shape(&self, shape: &[u64], mesh: &Mesh) -> SmallVec<[u64; 4]> {
        self.dims.iter().zip(shape).map(|(dim, &size)| dim.local_size(size, mesh)).collect()
    }

    /// Elements of that buffer.
    pub fn local_elements(&self, shape: &[u64], mesh: &Mesh) -> u64 {
        self.local_shape(shape, mesh).iter().product()
    }

    /// The shape of what this coordinate holds: a prefix of its buffer in every dimension.
    pub fn extents(&self, shape: &[u64], mesh: &Mesh, coord: &[u32]) -> SmallVec<[u64; 4]> {
        self.dims.iter().zip(shape).map(|(dim, &size)| dim.extent(size, mesh, coord)).collect()
    }

    /// Whether every cut gives equal pieces, so that no buffer has padding.
    pub fn divides(&self, shape: &[u64], mesh: &Mesh) -> bool {
        self.dims.iter().zip(shape).all(|(dim, &size)| dim.divides(size, mesh))
    }

    /// The axes that the elements are spread over.
    pub fn sharded_axes(&self) -> AxisSet {
        self.dims.iter().flat_map(DimLayout::axes).collect()
    }

    /// The axes that are still to be reduced over.
    pub fn partial_axes(&self) -> AxisSet {
        self.partial.map_or(AxisSet::EMPTY, |(_, axes)| axes)
    }

    /// The axes along which every coordinate holds the same.
    pub fn replicated_axes(&self, mesh: &Mesh) -> AxisSet {
        mesh.all().minus(self.sharded_axes()).minus(self.partial_axes())
    }

    /// The same layout with the value reduced.
    #[must_use]
    pub fn without_partial(&self) -> Sharding {
        Sharding { dims: self.dims.clone(), partial: None }
    }

    /// The same layout with the partial axes set; none if `axes` is empty.
    #[must_use]
    pub fn with_partial(&self, op: ReduceOp, axes: AxisSet) -> Sharding {
        let partial = (!axes.is_empty()).then_some((op, axes));
        Sharding { dims: self.dims.clone(), partial }
    }

    /// The same with dimension `dim` laid out as `layout`.
    #[must_use]
    pub fn with_dim(&self, dim: usize, layout: DimLayout) -> Sharding {
        let mut res = self.clone();
        res.dims[dim] = layout;
        res
    }

    /// The same no longer cut over `axes`: what a gather over them gives.
    #[must_use]
    pub fn without(&self, axes: AxisSet) -> Sharding {
        let dims = self.dims.iter().map(|it| it.without(axes));
        Sharding { dims: dims.collect(), partial: self.partial }
    }

    /// The same without the digits of axes of size 1, which cut nothing.
    #[must_use]
    pub fn without_unit_axes(&self, mesh: &Mesh) -> Sharding {
        self.without(mesh.axes().filter(|&it| mesh.size(it) == 1).collect())
    }

    /// The boxes of the global tensor that the coordinate holds, in the row-major order of the
    /// runs of its dimensions. None is empty; a coordinate that holds nothing has none.
    pub fn chunks(&self, shape: &[u64], mesh: &Mesh, coord: &[u32]) -> Vec<Chunk> {
        self.local_boxes(shape, mesh, coord).into_iter().map(|it| it.chunk).collect()
    }

    /// As [`Sharding::chunks`], with where each box lies in the coordinate's buffer.
    pub fn local_boxes(&self, shape: &[u64], mesh: &Mesh, coord: &[u32]) -> Vec<LocalBox> {
        let mut res = vec![LocalBox::default()];
        for (dim, &size) in self.dims.iter().zip(shape) {
            let runs: Runs = dim.runs(size, mesh, coord);
            let mut next = Vec::with_capacity(res.len() * runs.len());
            for it in &res {
                let mut at = 0;
                for &(start, len) in &runs {
                    let mut it = it.clone();
                    it.chunk.offsets.push(start);
                    it.chunk.sizes.push(len);
                    it.at.push(at);
                    at += len;
                    next.push(it);
                }
            }
            res = next;
        }
        res
    }

    /// Whether this coordinate is the one, of all that hold the same elements, that writes them.
    ///
    /// `salt` tells tensors apart (say, by their position among the parameters), so that the work
    /// spreads over the copies; so do the shards of one tensor.
    pub fn owns(&self, coord: &[u32], mesh: &Mesh, salt: u64) -> bool {
        let copies = mesh.all().minus(self.sharded_axes());
        mesh.index_in(copies, coord) == self.turn(coord, mesh, salt, copies)
    }

    /// The coordinate whose turn it is, of those that differ from `coord` over `copies` only, none of which
    /// shards: the one that [`owns`](Sharding::owns), where these are all copies there are.
    pub fn owner(&self, coord: &[u32], mesh: &Mesh, salt: u64, copies: AxisSet) -> Coord {
        let turn = self.turn(coord, mesh, salt, copies);
        mesh.group_of(copies, coord).nth(turn as usize).expect("a turn is less than their number")
    }

    fn turn(&self, coord: &[u32], mesh: &Mesh, salt: u64, copies: AxisSet) -> u64 {
        let shard = mesh.index_in(self.sharded_axes(), coord);
        salt.wrapping_add(shard) % mesh.set_size(copies)
    }

    /// Whether this is a layout of a tensor of `shape` on `mesh`.
    pub fn validate(&self, shape: &[u64], mesh: &Mesh) -> Result<(), PlacementError> {
        if self.dims.len() != shape.len() {
            return Err(PlacementError::Ndim { expected: shape.len(), found: self.dims.len() });
        }
        let mut seen = AxisSet::EMPTY;
        for (dim, (layout, &size)) in self.dims.iter().zip(shape).enumerate() {
            let granule = layout.granule();
            if !size.is_multiple_of(granule.into()) {
                return Err(PlacementError::Granule { dim, granule, size });
            }
            for &digit in layout.digits() {
                match digit {
                    Digit::Block(0) => return Err(PlacementError::ZeroBlocks { dim }),
                    Digit::Block(_) => (),
                    Digit::Axis(axis) => {
                        check_axis(axis, mesh)?;
                        if seen.contains(axis) {
                            return Err(self.reused(axis, dim, mesh));
                        }
                        seen = seen.with(axis);
                        if self.partial_axes().contains(axis) {
                            let axis = mesh.name(axis).to_string();
                            return Err(PlacementError::PartialAndSharded { axis, dim });
                        }
                    }
                }
            }
        }
        match self.partial {
            Some((op, AxisSet::EMPTY)) => Err(PlacementError::EmptyPartial { op }),
            Some((_, axes)) => axes.iter().try_for_each(|it| check_axis(it, mesh)),
            None => Ok(()),
        }
    }

    fn reused(&self, axis: Axis, second: usize, mesh: &Mesh) -> PlacementError {
        let first = self.dims.iter().position(|it| it.axes().any(|it| it == axis));
        let axis = mesh.name(axis).to_string();
        PlacementError::AxisReused { axis, first: first.unwrap_or(second), second }
    }

    /// Prints the sharding with the names of `mesh`: `[tp.dp, _] sum(cp)`.
    pub fn display<'a>(&'a self, mesh: &'a Mesh) -> impl fmt::Display + 'a {
        Display(self, mesh)
    }

    /// Reads what [`Sharding::display`] prints. The name of a refined axis stands for its parts.
    pub fn parse(text: &str, mesh: &Mesh) -> Result<Sharding, PlacementError> {
        let fail = |why: String| PlacementError::Parse { text: text.to_string(), why };
        let rest =
            text.trim().strip_prefix('[').ok_or_else(|| fail("it starts with no `[`".into()))?;
        let (dims, partial) = rest.split_once(']').ok_or_else(|| fail("it has no `]`".into()))?;
        let mut res = Sharding::default();
        if !dims.trim().is_empty() {
            for dim in dims.split(',') {
                res.dims.push(parse_dim(dim.trim(), mesh, fail)?);
            }
        }
        let partial = partial.trim();
        if !partial.is_empty() {
            let (op, axes) = partial
                .strip_suffix(')')
                .and_then(|it| it.split_once('('))
                .ok_or_else(|| fail(format!("`{partial}` is no reduction")))?;
            let op = ReduceOp::ALL.into_iter().find(|it| it.name() == op.trim());
            let op = op.ok_or_else(|| fail("a reduction is sum, avg, max or min".into()))?;
            let names: SmallVec<[&str; 4]> = axes.split(',').map(str::trim).collect();
            res.partial = Some((op, mesh.axis_set(&names)?));
        }
        res.validate(&SmallVec::<[u64; 4]>::from_elem(0, res.dims.len()), mesh)?;
        Ok(res)
    }
}

fn check_axis(axis: Axis, mesh: &Mesh) -> Result<(), PlacementError> {
    if (axis.0 as usize) < mesh.axes.len() {
        return Ok(());
    }
    Err(PlacementError::AxisOutOfRange { axis: axis.0, axes: mesh.axes.len() })
}

fn parse_dim(
    text: &str,
    mesh: &Mesh,
    fail: impl Fn(String) -> PlacementError,
) -> Result<DimLayout, PlacementError> {
    if text == "_" {
        return Ok(DimLayout::whole());
    }
    let (text, granule) = match text.split_once('%') {
        Some((text, granule)) => {
            let number = granule.trim().parse().ok().filter(|&it: &u32| it > 0);
            let why = || {
                format!(
                    "`%{granule}` is no granule; write a number from 1 to {}, behind all axes, as in `[tp.dp%128]`",
                    u32::MAX
                )
            };
            let granule = number.ok_or_else(|| fail(why()))?;
            (text.trim(), granule)
        }
        None => (text, 1),
    };
    let mut digits: SmallVec<[Digit; 4]> = SmallVec::new();
    for name in text.split('.').map(str::trim) {
        let axes = mesh.axes_named(name);
        if !axes.is_empty() {
            digits.extend(axes.into_iter().map(Digit::Axis));
        } else if let Some(n) = name.strip_prefix('x').and_then(|it| it.parse().ok()) {
            digits.push(Digit::Block(n));
        } else if name.is_empty() {
            return Err(fail("a dimension is empty; write `_` where it is whole".into()));
        } else {
            return Err(mesh.unknown(name));
        }
    }
    Ok(DimLayout::new(digits).in_granules(granule))
}

struct Display<'a>(&'a Sharding, &'a Mesh);

impl fmt::Display for Display<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Display(sharding, mesh) = self;
        f.write_str("[")?;
        for (dim, layout) in sharding.dims.iter().enumerate() {
            f.write_str(if dim == 0 { "" } else { ", " })?;
            f.write_str(if layout.is_whole() { "_" } else { "" })?;
            for (i, digit) in layout.digits().iter().enumerate() {
                f.write_str(if i == 0 { "" } else { "." })?;
                match *digit {
                    Digit::Axis(axis) => f.write_str(mesh.name(axis))?,
                    Digit::Block(n) => write!(f, "x{n}")?,
                }
            }
            if layout.granule() != 1 {
                write!(f, "%{}", layout.granule())?;
            }
        }
        f.write_str("]")?;
        match sharding.partial {
            Some((op, axes)) => write!(f, " {op}({})", mesh.names(axes)),
            None => Ok(()),
        }
    }
}

/// The axes of more than one coordinate along which all of these are the same on every coordinate. An op on such
/// operands and results does the same work along them.
pub fn axes_alike<'a>(shardings: impl IntoIterator<Item = &'a Sharding>, mesh: &Mesh) -> AxisSet {
    let large = mesh.axes().filter(|&it| mesh.size(it) > 1).collect::<AxisSet>();
    let alike = |axes: AxisSet, it: &Sharding| axes.intersect(it.replicated_axes(mesh));
    shardings.into_iter().fold(large, alike)
}

/// Shards a parameter further for FSDP: `axes` become the minor digits of `dim`.
///
/// ```text
/// fsdp([tp, _], 0, dp) -> [tp.dp, _]
/// fsdp([_, tp], 0, dp) -> [dp, tp]
/// ```
///
/// # Panics
///
/// If the tensor has no dimension `dim`.
pub fn fsdp(sharding: &Sharding, dim: usize, axes: impl IntoIterator<Item = Axis>) -> Sharding {
    sharding.with_dim(dim, sharding.dims[dim].then(axes.into_iter().map(Digit::Axis)))
}
