//! The mesh: named axes, major to minor; a rank is the row-major number of a coordinate.
//!
//! An axis of the user's mesh may be *refined* into adjacent sub-axes, so that a layout can use a
//! part of it and still be made of ordinary digits. Grouped KV heads are the case it is for:
//!
//! ```text
//! (dp=2, tp=4), 2 KV heads
//! refine("tp", 2, "tp_kv", "tp_rep")  ->  (dp=2, tp_kv=2, tp_rep=2), same ranks
//! query heads  [tp_kv.tp_rep]         ->  what [tp] was
//! KV heads     [tp_kv]                ->  replicated over tp_rep; their gradient is sum(tp_rep)
//! ```

use smallvec::SmallVec;

use super::PlacementError;

/// Index of an axis in its [`Mesh`], major to minor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Axis(pub u8);

/// A set of mesh axes. Names a communicator, an amax group, a set of replicas.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    serde::Serialize,
    serde::Deserialize,
)]
pub struct AxisSet(pub u16);

/// A position in the mesh: one index per axis.
pub type Coord = SmallVec<[u32; 4]>;

/// A grid of ranks with named axes, major to minor.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Mesh {
    /// The axes; the last one varies fastest over ranks.
    pub axes: Vec<MeshAxis>,
}

/// One axis of a [`Mesh`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MeshAxis {
    /// Unique in the mesh.
    pub name: String,
    /// How many coordinates it has; at least 1.
    pub size: u32,
    /// The axis of the user's mesh that this is a part of, if that was refined.
    pub part_of: Option<String>,
}

impl MeshAxis {
    /// The name of this axis in the user's mesh.
    pub fn user_name(&self) -> &str {
        self.part_of.as_deref().unwrap_or(&self.name)
    }
}

impl Mesh {
    /// A mesh of these axes, major to minor, none refined.
    pub fn new(axes: &[(&str, u32)]) -> Mesh {
        let axis =
            |&(name, size): &(&str, u32)| MeshAxis { name: name.to_string(), size, part_of: None };
        Mesh { axes: axes.iter().map(axis).collect() }
    }

    /// The most ranks of a mesh. Costs of collectives are computed from the node of each rank.
    pub const MAX_RANKS: u32 = 1 << 20;

    /// Whether names are distinct and can be written in a layout, and sizes make sense.
    pub fn validate(&self) -> Result<(), PlacementError> {
        let mut ranks = 1_u32;
        for (i, axis) in self.axes.iter().enumerate() {
            ranks = ranks.saturating_mul(axis.size);
            let why = if axis.size == 0 {
                "an axis needs at least one coordinate"
            } else if ranks > Mesh::MAX_RANKS {
                "with it the mesh has more than 2^20 ranks, the most that planc plans for; use smaller axes"
            } else if i >= AxisSet::MAX_AXES {
                "a mesh has at most 16 axes; join some of them"
            } else if !is_axis_name(&axis.name) {
                "a name is letters, digits and `_`, starts with a letter, and is not `x2` and the like"
            } else if self.axes[..i].iter().any(|it| it.name == axis.name) {
                "the name is taken by an earlier axis; rename one of them"
            } else {
                continue;
            };
            return Err(PlacementError::BadMesh { axis: axis.name.clone(), size: axis.size, why });
        }
        Ok(())
    }

    /// The number of coordinates along `axis`.
    pub fn size(&self, axis: Axis) -> u32 {
        self.axes[axis.0 as usize].size
    }

    /// The name of `axis`.
    pub fn name(&self, axis: Axis) -> &str {
        &self.axes[axis.0 as usize].name
    }

    /// All axes, major to minor.
    pub fn axes(&self) -> impl DoubleEndedIterator<Item = Axis> + ExactSizeIterator + use<> {
        (0..self.axes.len() as u8).map(Axis)
    }

    /// The set of all axes.
    pub fn all(&self) -> AxisSet {
        self.axes().collect()
    }

    /// The axis of this name, sub-axes by their own names.
    pub fn axis(&self, name: &str) -> Option<Axis> {
        self.axes().find(|&it| self.name(it) == name)
    }

    /// The axis of this name, or all sub-axes of the user's axis of this name, major to minor.
    /// Empty if there is none.
    pub fn axes_named(&self, name: &str) -> SmallVec<[Axis; 2]> {
        match self.axis(name) {
            Some(axis) => SmallVec::from_slice(&[axis]),
            None => self
                .axes()
                .filter(|it| self.axes[it.0 as usize].part_of.as_deref() == Some(name))
                .collect(),
        }
    }

    /// The set of the axes of these names, each as in [`Mesh::axes_named`].
    pub fn axis_set(&self, names: &[&str]) -> Result<AxisSet, PlacementError> {
        let mut res = AxisSet::EMPTY;
        for name in names {
            let axes = self.axes_named(name);
            if axes.is_empty() {
                return Err(self.unknown(name));
            }
            res = axes.into_iter().fold(res, AxisSet::with);
        }
        Ok(res)
    }

    /// Splits `name` into two adjacent axes: `major_name` of size `major`, then `minor_name`.
    ///
    /// Ranks stay where they are. Axis numbers after the split move up, so refine a mesh before
    /// making layouts on it. Refining a sub-axis again keeps naming the user's axis.
    pub fn refine(
        &self,
        name: &str,
        major: u32,
        major_name: &str,
        minor_name: &str,
    ) -> Result<Mesh, PlacementError> {
        let at = self.axis(name).ok_or_else(|| self.unknown(name))?.0 as usize;
        let old = &self.axes[at];
        if major == 0 || !old.size.is_multiple_of(major) {
            return Err(PlacementError::Refine { axis: name.to_string(), size: old.size, major });
        }
        let part = |name: &str, size| MeshAxis {
            name: name.to_string(),
            size,
            part_of: Some(old.user_name().to_string()),
        };
        let parts = [part(major_name, major), part(minor_name, old.size / major)];
        let mut res = self.clone();
        res.axes.splice(at..=at, parts);
        res.validate()?;
        Ok(res)
    }

    /// Names and sizes of the user's mesh, before any axis was refined.
    pub fn user_axes(&self) -> Vec<(&str, u32)> {
        let named = |axes: &[MeshAxis]| axes.iter().map(|it| it.size).product();
        self.groups().map(|it| (it[0].user_name(), named(it))).collect()
    }

    /// The axes, those that were one axis of the user's mesh together.
    fn groups(&self) -> impl Iterator<Item = &[MeshAxis]> {
        self.axes.chunk_by(|a, b| a.part_of.is_some() && a.part_of == b.part_of)
    }

    /// For each axis of the user's mesh, its axes here, major to minor.
    pub(super) fn user_groups(&self) -> impl Iterator<Item = SmallVec<[Axis; 2]>> {
        let mut next = 0;
        self.groups().map(move |group| {
            let first = next;
            next += group.len() as u8;
            (first..next).map(Axis).collect()
        })
    }

    /// Whether `minor` comes right after `major` inside one axis of the user's mesh.
    pub(super) fn continues(&self, major: Axis, minor: Axis) -> bool {
        minor.0 == major.0 + 1 && {
            let part_of = &self.axes[major.0 as usize].part_of;
            part_of.is_some() && *part_of == self.axes[minor.0 as usize].part_of
        }
    }

    /// The number of ranks.
    pub fn n_ranks(&self) -> u64 {
        self.set_size(self.all())
    }

    /// The number of coordinates in a group over `axes`.
    pub fn set_size(&self, axes: AxisSet) -> u64 {
        axes.iter().map(|it| u64::from(self.size(it))).product()
    }

    /// All coordinates in rank order. For the runtime, inspection and tests: compiling never
    /// walks over coordinates.
    pub fn coords(&self) -> impl Iterator<Item = Coord> + '_ {
        (0..self.n_ranks()).map(|it| self.coord_of(it))
    }

    /// The coordinate of a rank: its digits in the sizes of the axes.
    pub fn coord_of(&self, rank: u64) -> Coord {
        let mut rest = rank;
        let mut res: Coord = self
            .axes
            .iter()
            .rev()
            .map(|it| {
                let at = rest % u64::from(it.size);
                rest /= u64::from(it.size);
                at as u32
            })
            .collect();
        res.reverse();
        res
    }

    /// The rank at a coordinate.
    pub fn rank_of(&self, coord: &[u32]) -> u64 {
        self.index_in(self.all(), coord)
    }

    /// The row-major number of `coord` among those that differ only over `axes`.
    pub fn index_in(&self, axes: AxisSet, coord: &[u32]) -> u64 {
        axes.iter()
            .fold(0, |res, it| res * u64::from(self.size(it)) + u64::from(coord[it.0 as usize]))
    }

    /// The coordinates that differ from `coord` only over `axes`, in row-major order.
    pub fn group_of(&self, axes: AxisSet, coord: &[u32]) -> impl Iterator<Item = Coord> + '_ {
        let base = Coord::from_slice(coord);
        (0..self.set_size(axes)).map(move |index| {
            let mut res = base.clone();
            let mut rest = index;
            for axis in axes.iter().rev() {
                let size = u64::from(self.size(axis));
                res[axis.0 as usize] = (rest % size) as u32;
                rest /= size;
            }
            res
        })
    }

    /// The names of `axes`, as `dp, tp`.
    pub fn names(&self, axes: AxisSet) -> String {
        axes.iter().map(|it| self.name(it)).collect::<Vec<&str>>().join(", ")
    }

    /// Axes in `text`, with all parts of one of the user's axes together written as that:
    /// `tp_kv, tp_rep` -> `tp`, `[tp_kv.tp_rep.dp, _]` -> `[tp.dp, _]`.
    pub fn in_user_axes(&self, text: &str, separator: &str) -> String {
        let mut res = text.to_string();
        for parts in self.groups().filter(|it| it[0].part_of.is_some()) {
            let names: Vec<&str> = parts.iter().map(|it| it.name.as_str()).collect();
            res = res.replace(&names.join(separator), parts[0].user_name());
        }
        res
    }

    /// The error for a name that is no axis here.
    pub fn unknown(&self, name: &str) -> PlacementError {
        PlacementError::UnknownAxis { name: name.to_string(), known: self.names(self.all()) }
    }
}

/// Letters, digits and `_`, and not to be mistaken for a block (`x2`) or a whole dimension (`_`).
fn is_axis_name(name: &str) -> bool {
    let is_block = name.strip_prefix('x').is_some_and(|it| it.parse::<u32>().is_ok());
    name.starts_with(|it: char| it.is_ascii_alphabetic())
        && name.chars().all(|it| it.is_ascii_alphanumeric() || it == '_')
        && !is_block
}

impl AxisSet {
    /// No axis.
    pub const EMPTY: AxisSet = AxisSet(0);
    /// How many axes a mesh can have.
    pub const MAX_AXES: usize = 16;

    /// With `axis` added.
    #[must_use]
    pub fn with(self, axis: Axis) -> AxisSet {
        AxisSet(self.0 | 1 << axis.0)
    }

    /// With `axis` removed.
    #[must_use]
    pub fn without(self, axis: Axis) -> AxisSet {
        AxisSet(self.0 & !(1 << axis.0))
    }

    /// Whether `axis` is in it.
    pub fn contains(self, axis: Axis) -> bool {
        self.0 >> axis.0 & 1 == 1
    }

    /// The axes in either.
    #[must_use]
    pub fn union(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 | other.0)
    }

    /// The axes in both.
    #[must_use]
    pub fn intersect(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 & other.0)
    }

    /// The axes in this and not in `other`.
    #[must_use]
    pub fn minus(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 & !other.0)
    }

    /// Whether it has no axis.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether all its axes are in `other`.
    pub fn is_subset(self, other: AxisSet) -> bool {
        self.minus(other).is_empty()
    }

    /// How many axes it has.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Its axes, major to minor.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = Axis> {
        (0..Self::MAX_AXES as u8).map(Axis).filter(move |&it| self.contains(it))
    }

    /// Its subsets, without the empty one.
    pub(super) fn subsets(self) -> impl Iterator<Item = AxisSet> {
        (1..=self.0).map(AxisSet).filter(move |it| it.is_subset(self))
    }
}

impl FromIterator<Axis> for AxisSet {
    fn from_iter<I: IntoIterator<Item = Axis>>(axes: I) -> AxisSet {
        axes.into_iter().fold(AxisSet::EMPTY, AxisSet::with)
    }
}
