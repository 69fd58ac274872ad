//! `Factors`: which dimensions of operands and results correspond, in einsum notation.
//!
//! A sharding of the op is an [`Assignment`]: one layout per factor. Shardings of operands and
//! results follow from it, so propagation, legality and partial results need no code per op.

use smallvec::{SmallVec, smallvec};

use crate::ops::BoundAt;
use crate::placement::{AxisSet, DimLayout, Mesh, ReduceOp, Sharding};
use crate::types::TensorType;

/// Factors of one dimension, major to minor.
pub type DimFactors = SmallVec<[u8; 2]>;
/// Factors of the dimensions of one operand or result.
pub type Dims = SmallVec<[DimFactors; 4]>;

/// Which dimensions of operands and results correspond, in einsum notation:
///
/// ```text
/// * k, n k -> * n             linear: `*` stands for all leading dimensions
/// b s (h d) -> b s h d        a dimension of several factors, major to minor
/// v d, * -> * d               `v` reaches no result: sharding it gives a partial result
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Factors {
    /// All factors of the op.
    pub factors: SmallVec<[Factor; 8]>,
    /// Factors of each operand.
    pub inputs: SmallVec<[Dims; 4]>,
    /// Factors of each result.
    pub results: SmallVec<[Dims; 2]>,
    /// How each result is reduced over sharded factors that it lacks.
    pub reduce: SmallVec<[ReduceOp; 2]>,
    /// Whether partial sums may pass through.
    pub linear: Linear,
    /// Operands that are added to result 0 as they are: where it is a partial sum, so are they.
    pub addends: SmallVec<[u8; 2]>,
    /// Results that follow from operands without factors alone, so that every coordinate makes them alike, whatever is
    /// sharded.
    pub alike: SmallVec<[u8; 1]>,
}

/// A dimension of the op's iteration space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Factor {
    /// Its letter; leading dimensions are `0`, `1`, ...
    pub name: char,
    /// Its global size.
    pub size: u64,
    /// It may not be sharded.
    pub whole: bool,
    /// Every cut must be even: the op does not keep padding at zero.
    pub even: bool,
    /// A shard must be one contiguous range.
    pub contiguous: bool,
}

/// Whether partial sums may pass through an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Linear {
    /// Operands are reduced first.
    No,
    /// `f(x1 + x2, y1 + y2) = f(x1, y1) + f(x2, y2)`: all operands partial, then so is the result.
    Joint,
}

/// A layout for each factor, and the partial sum that passes through a linear op.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Assignment {
    /// Layout of each factor.
    pub layouts: SmallVec<[DimLayout; 8]>,
    /// Axes over which every operand is a partial sum.
    pub partial: AxisSet,
}

/// Why an op cannot run on operands sharded like this.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// Operands disagree.
    #[error("operand {operand} shards factor `{factor}` differently from an operand before it")]
    Disagree {
        /// Which operand.
        operand: usize,
        /// Which factor.
        factor: char,
    },
    /// One axis cuts two factors.
    #[error("an axis shards two factors, one of them `{factor}`")]
    AxisTwice {
        /// One of the factors.
        factor: char,
    },
    /// The factor may not be sharded.
    #[error("factor `{factor}` of size {size} must be whole")]
    Whole {
        /// Which factor.
        factor: char,
        /// Its size.
        size: u64,
    },
    /// The factor may not be cut unevenly.
    #[error("factor `{factor}` of size {size} must be cut evenly")]
    Uneven {
        /// Which factor.
        factor: char,
        /// Its size.
        size: u64,
    },
    /// The factor may not be strided.
    #[error("factor `{factor}` of size {size} must be cut into contiguous ranges")]
    Strided {
        /// Which factor.
        factor: char,
        /// Its size.
        size: u64,
    },
    /// A digit of a dimension straddles two of its factors.
    #[error("the layout of dim {dim} of operand {operand} cuts across its factors")]
    Straddles {
        /// Which operand.
        operand: usize,
        /// Which dimension.
        dim: usize,
    },
    /// A partial value meets an op that needs the whole sum, or the other way round.
    #[error("operand {operand} is a partial value, which this op cannot take as it is")]
    Partial {
        /// Which operand.
        operand: usize,
    },
}

impl Factors {
    /// Reads einsum notation against well-typed operands.
    ///
    /// # Panics
    /// If the notation does not fit the types: a bug in the op.
    pub fn new(text: &str, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::with_sizes(text, &[], inputs, results)
    }

    /// Like [`Factors::new`], with the sizes of factors inside `( )`; one of each group may be left
    /// out, and follows.
    pub fn with_sizes(
        text: &str,
        sizes: &[(char, u64)],
        inputs: &[&TensorType],
        results: &[&TensorType],
    ) -> Factors {
        let (lhs, rhs) = text.split_once("->").expect("factors are `inputs -> results`");
        let mut res = Factors {
            factors: SmallVec::new(),
            inputs: SmallVec::new(),
            results: SmallVec::new(),
            reduce: smallvec![ReduceOp::Sum; results.len()],
            linear: Linear::No,
            addends: SmallVec::new(),
            alike: SmallVec::new(),
        };
        for (spec, ty) in lhs.split(',').zip(inputs) {
            let dims = res.read(spec, sizes, ty);
            res.inputs.push(dims);
        }
        // A variadic op repeats its last operand.
        while res.inputs.len() < inputs.len() {
            let last = res.inputs.last().expect("an op has operands").clone();
            res.inputs.push(last);
        }
        for (spec, ty) in rhs.split(',').zip(results) {
            let dims = res.read(spec, sizes, ty);
            res.results.push(dims);
        }
        assert_eq!(
            res.results.len(),
            results.len(),
            "factors `{text}` for {} results",
            results.len()
        );
        res
    }

    fn read(&mut self, spec: &str, sizes: &[(char, u64)], ty: &TensorType) -> Dims {
        let mut dims = Dims::new();
        let mut group: Option<DimFactors> = None;
        let n_named = n_dims(spec);
        let star =
            ty.ndim().checked_sub(n_named).expect("factors name no more dims than there are");
        let known = |name: char| sizes.iter().find(|it| it.0 == name).map(|it| it.1);
        for c in spec.chars().filter(|it| !it.is_whitespace()) {
            match c {
                '*' => {
                    for i in 0..star {
                        let name = char::from(b'0' + i as u8);
                        let factor = self.factor(name, Some(ty.shape[dims.len()]));
                        dims.push(smallvec![factor]);
                    }
                }
                '(' => group = Some(DimFactors::new()),
                ')' => {
                    let members = group.take().expect("`)` closes a group");
                    self.solve(&members, ty.shape[dims.len()]);
                    dims.push(members);
                }
                name => match &mut group {
                    Some(members) => {
                        let factor = self.factor(name, known(name));
                        members.push(factor);
                    }
                    None => {
                        let factor = self.factor(name, Some(ty.shape[dims.len()]));
                        dims.push(smallvec![factor]);
                    }
                },
            }
        }
        assert_eq!(dims.len(), ty.ndim(), "factors `{spec}` for {ty}");
        dims
    }

    /// Index of the factor `name`, which has size `size` where that is known.
    fn factor(&mut self, name: char, size: Option<u64>) -> u8 {
        if let Some(i) = self.factors.iter().position(|it| it.name == name) {
            if let Some(size) = size {
                self.factors[i].size = size;
            }
            return i as u8;
        }
        let (whole, even, contiguous) = (false, false, false);
        self.factors.push(Factor { name, size: size.unwrap_or(0), whole, even, contiguous });
        (self.factors.len() - 1) as u8
    }

    /// Computes the one unknown size of a group from the size of the dimension.
    fn solve(&mut self, members: &[u8], size: u64) {
        let known: u64 =
            members.iter().map(|&it| self.factors[it as usize].size).filter(|&it| it > 0).product();
        for &member in members {
            let factor = &mut self.factors[member as usize];
            if factor.size == 0 {
                factor.size = size / known;
            }
        }
    }

    /// These factors may not be sharded.
    pub fn whole(mut self, names: &str) -> Factors {
        self.each(names, |it| it.whole = true);
        self
    }

    /// These factors may only be cut evenly; `*` names the leading dimensions.
    pub fn even(mut self, names: &str) -> Factors {
        self.each(names, |it| it.even = true);
        self
    }

    fn each(&mut self, names: &str, f: impl Fn(&mut Factor)) {
        for factor in &mut self.factors {
            let star = names.contains('*') && factor.name.is_ascii_digit();
            if star || names.contains(factor.name) {
                f(factor);
            }
        }
    }

    /// Result `index` is reduced with `op` over sharded factors that it lacks.
    pub fn reduce(mut self, index: usize, op: ReduceOp) -> Factors {
        self.reduce[index] = op;
        self
    }

    /// Result `index` follows from operands without factors alone.
    pub fn alike(mut self, index: usize) -> Factors {
        self.alike.push(index as u8);
        self
    }

    /// Partial sums pass through.
    pub fn linear(mut self, linear: Linear) -> Factors {
        self.linear = linear;
        self
    }

    /// Operands from `first` on are added to result 0.
    pub(crate) fn add_from(mut self, first: usize) -> Factors {
        self.addends = (first..self.inputs.len()).map(|it| it as u8).collect();
        self
    }

    /// Dimensions of which the op knows bounds must be contiguous.
    pub(crate) fn contiguous(mut self, bounds: &[BoundAt]) -> Factors {
        for bound in bounds {
            let dim = match *bound {
                BoundAt::Input(i, dim) => &self.inputs[i][dim],
                BoundAt::Result(i, dim) => &self.results[i][dim],
            };
            for &factor in dim {
                self.factors[factor as usize].contiguous = true;
            }
        }
        self
    }

    /// The assignment in which nothing is sharded.
    pub fn nothing(&self) -> Assignment {
        let layouts = smallvec![DimLayout::default(); self.factors.len()];
        Assignment { layouts, partial: AxisSet::EMPTY }
    }

    /// Layout of each factor of `dims` under `sharding`.
    fn split(
        &self,
        dims: &Dims,
        sharding: &Sharding,
        mesh: &Mesh,
        mut f: impl FnMut(u8, DimLayout),
    ) -> Result<(), usize> {
        for (i, (dim, layout)) in dims.iter().zip(&sharding.dims).enumerate() {
            match dim.as_slice() {
                [] => (),
                [one] => f(*one, layout.clone()),
                many => {
                    let sizes: SmallVec<[u64; 4]> =
                        many.iter().map(|&it| self.factors[it as usize].size).collect();
                    let parts = layout.split(&sizes, mesh).ok_or(i)?;
                    many.iter().zip(parts).for_each(|(&factor, part)| f(factor, part));
                }
            }
        }
        Ok(())
    }

    /// Shards the factors of `dims` as `sharding` does, where they are not sharded yet, may be, and
    /// the axes are still free. What cannot be taken over is left out.
    pub fn adopt(
        &self,
        assignment: &mut Assignment,
        dims: &Dims,
        sharding: &Sharding,
        mesh: &Mesh,
    ) {
        let mut used = assignment.axes();
        // A straddling layout is taken over as far as it can be read.
        let _ = self.split(dims, sharding, mesh, |factor, layout| {
            let slot = &mut assignment.layouts[factor as usize];
            let axes: AxisSet = layout.axes().collect();
            let free = slot.is_whole() && axes.intersect(used).is_empty();
            if free && !axes.is_empty() && self.permits(factor, &layout, mesh).is_ok() {
                *slot = layout;
                used = used.union(axes);
            }
        });
    }

    /// Whether factor `index` may be laid out like this.
    fn permits(&self, index: u8, layout: &DimLayout, mesh: &Mesh) -> Result<(), Conflict> {
        let factor = self.factors[index as usize];
        let (name, size) = (factor.name, factor.size);
        if layout.is_whole() {
            return Ok(());
        }
        if factor.whole {
            return Err(Conflict::Whole { factor: name, size });
        }
        if factor.even && !layout.divides(size, mesh) {
            return Err(Conflict::Uneven { factor: name, size });
        }
        if factor.contiguous && !layout.is_contiguous() {
            return Err(Conflict::Strided { factor: name, size });
        }
        Ok(())
    }

    /// The sharding of a tensor with these `dims`; `None` where a dimension of several factors
    /// would be cut unevenly inside.
    fn sharding(&self, dims: &Dims, assignment: &Assignment, mesh: &Mesh) -> Option<Sharding> {
        let mut res = Sharding::replicated(dims.len());
        for (dim, slot) in dims.iter().zip(&mut res.dims) {
            *slot = match dim.as_slice() {
                [] => DimLayout::default(),
                [one] => assignment.layouts[*one as usize].clone(),
                many => {
                    let parts: SmallVec<[(DimLayout, u64); 4]> = many
                        .iter()
                        .map(|&it| {
                            let it = it as usize;
                            (assignment.layouts[it].clone(), self.factors[it].size)
                        })
                        .collect();
                    DimLayout::join(&parts, mesh)?
                }
            };
        }
        Some(res)
    }

    /// The sharding that operand `index` must have under `assignment`.
    pub fn input(&self, index: usize, assignment: &Assignment, mesh: &Mesh) -> Option<Sharding> {
        let mut res = self.sharding(&self.inputs[index], assignment, mesh)?;
        let partial = match self.is_addend(index) {
            true => self.reduced(0, assignment),
            false => assignment.partial,
        };
        if !partial.is_empty() {
            res.partial = Some((ReduceOp::Sum, partial));
        }
        Some(res)
    }

    /// The sharding that result `index` has under `assignment`.
    pub fn result(&self, index: usize, assignment: &Assignment, mesh: &Mesh) -> Option<Sharding> {
        let mut res = self.sharding(&self.results[index], assignment, mesh)?;
        let reduced = self.reduced(index, assignment);
        if !reduced.is_empty() {
            res.partial = Some((self.reduce[index], reduced));
        }
        Some(res)
    }

    /// Axes over which result `index` is partial.
    fn reduced(&self, index: usize, assignment: &Assignment) -> AxisSet {
        let dims = &self.results[index];
        let mut res = assignment.partial;
        if self.alike.iter().any(|&it| it as usize == index) {
            return res;
        }
        for (i, layout) in assignment.layouts.iter().enumerate() {
            if !layout.is_whole() && !dims.iter().flatten().any(|&it| it as usize == i) {
                res = res.union(layout.axes().collect());
            }
        }
        res
    }

    fn is_addend(&self, operand: usize) -> bool {
        self.addends.iter().any(|&it| it as usize == operand)
    }

    /// The assignment under which operands sharded like `inputs` meet, or why there is none. What
    /// only results have is not sharded: see [`Factors::adopt`].
    pub fn assign(&self, inputs: &[&Sharding], mesh: &Mesh) -> Result<Assignment, Conflict> {
        let mut res = self.nothing();
        let mut seen: SmallVec<[bool; 8]> = smallvec![false; self.factors.len()];
        for (operand, (dims, sharding)) in self.inputs.iter().zip(inputs).enumerate() {
            let mut conflict = None;
            self.split(dims, sharding, mesh, |factor, layout| {
                let slot = &mut res.layouts[factor as usize];
                if seen[factor as usize] && *slot != layout {
                    let factor = self.factors[factor as usize].name;
                    conflict = Some(Conflict::Disagree { operand, factor });
                }
                seen[factor as usize] = true;
                *slot = layout;
            })
            .map_err(|dim| Conflict::Straddles { operand, dim })?;
            if let Some(conflict) = conflict {
                return Err(conflict);
            }
            if !self.is_addend(operand) {
                res.partial = self.partial(operand, sharding, res.partial)?;
            }
        }
        self.check(&res, mesh)?;
        let reduced = self.reduced(0, &res);
        for &operand in &self.addends {
            let sharding = inputs[operand as usize];
            let sum = matches!(sharding.partial, None | Some((ReduceOp::Sum, _)));
            if !sum || sharding.partial_axes() != reduced {
                return Err(Conflict::Partial { operand: operand as usize });
            }
        }
        Ok(res)
    }

    /// The partial axes that `operand` may bring, given those of the operands before it.
    fn partial(
        &self,
        operand: usize,
        sharding: &Sharding,
        before: AxisSet,
    ) -> Result<AxisSet, Conflict> {
        let axes = sharding.partial_axes();
        let sum = matches!(sharding.partial, None | Some((ReduceOp::Sum, _)));
        let fits = match self.linear {
            Linear::No => axes.is_empty(),
            Linear::Joint => sum && (operand == 0 || axes == before),
        };
        fits.then_some(axes).ok_or(Conflict::Partial { operand })
    }

    /// Whether every factor may be laid out as `assignment` says, with no axis used twice.
    pub fn check(&self, assignment: &Assignment, mesh: &Mesh) -> Result<(), Conflict> {
        let mut used = assignment.partial;
        for (i, layout) in assignment.layouts.iter().enumerate() {
            self.permits(i as u8, layout, mesh)?;
            for axis in layout.axes() {
                if used.contains(axis) {
                    return Err(Conflict::AxisTwice { factor: self.factors[i].name });
                }
                used = used.with(axis);
            }
        }
        Ok(())
    }
}

impl Assignment {
    /// Axes that shard a factor or are partial.
    pub fn axes(&self) -> AxisSet {
        self.layouts.iter().flat_map(|it| it.axes()).fold(self.partial, AxisSet::with)
    }
}

/// Dimensions that a spec names, without `*`.
fn n_dims(spec: &str) -> usize {
    let mut depth = 0;
    let mut n = 0;
    for c in spec.chars().filter(|it| !it.is_whitespace() && *it != '*') {
        match c {
            '(' => {
                depth += 1;
                n += 1;
            }
            ')' => depth -= 1,
            _ if depth == 0 => n += 1,
            _ => (),
        }
    }
    n
}

/// Letters for dimensions of these numbers, for ops that count dimensions from the front.
pub(crate) fn letters(dims: std::ops::Range<usize>) -> String {
    dims.map(|it| char::from(b'a' + it as u8)).collect()
}
