//! `Body`: a small program of ops that runs as one.
//!
//! ```text
//! body @glu+amax+quantize (bf16, bf16, f32) {     operands %0, %1 and %2, of these types and any shape
//!   %3 = cast(to:f32) %0
//!   %4 = cast(to:f32) %1
//!   %5 = glu(kind:swiglu) %3, %4                  in f32: nothing is rounded before it is quantized
//!   %6 = amax %5
//!   %7 = quantize(to:e4m3) %5, %2
//!   return %7, %6
//! }
//! ```
//!
//! A value is rounded to its type, as if a program had it. Bodies are equal if they do the same; they are shared, so
//! that 32 layers have one.

mod edit;
mod join;

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::{fmt, hash};

use rustc_hash::FxHasher;
use smallvec::SmallVec;

use crate::ops::{Op, OpKind, Real, TypeError, Types, View, ViewMut, arity};
use crate::types::{DType, TensorType};

pub use edit::Source;
pub(super) use join::factors;

/// A value of a body, by its number: first come operands, and then the results of each step.
pub type Slot = u8;

/// A small program of ops that runs as one, shared by all nodes that do the same. [`Body::new`] makes one, so that every
/// slot is there before it is read.
#[derive(Clone)]
pub struct Body(Arc<BodyData>);

struct BodyData {
    operands: SmallVec<[DType; 4]>,
    steps: Vec<Step>,
    results: SmallVec<[Slot; 4]>,
    name: String,
    in_place: Vec<(usize, usize)>,
    first_gradients: Vec<usize>,
    hash: u64,
}

/// An op of a body.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Step {
    /// The op, which has no body itself.
    pub op: Op,
    /// The values that it reads.
    pub inputs: SmallVec<[Slot; 4]>,
    /// The number of its results.
    pub n_results: u8,
}

/// Why steps are no body.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// There are no steps, or too many.
    #[error("a body has 1 to {limit} steps, not {found}")]
    Steps {
        /// The largest number.
        limit: usize,
        /// The number that it has.
        found: usize,
    },
    /// There are too many values.
    #[error("a body has at most {limit} values, not {found}")]
    Slots {
        /// The largest number.
        limit: usize,
        /// The number that it has.
        found: usize,
    },
    /// An op that runs alone.
    #[error("`{op}` cannot be a step of a body")]
    Op {
        /// Name of the op.
        op: &'static str,
    },
    /// A value is read that is not there.
    #[error("`%{slot}` is not made before it is read")]
    Unknown {
        /// Number of the value.
        slot: usize,
    },
    /// An operand that nothing reads.
    #[error("no step reads operand `%{slot}`")]
    Unread {
        /// Number of the value.
        slot: usize,
    },
    /// There is no result.
    #[error("a body returns a value")]
    NoResult,
    /// A result that is none.
    #[error("`%{slot}` cannot be returned: a result is made by a step, and returned once")]
    Result {
        /// Number of the value.
        slot: usize,
    },
}

impl Body {
    /// The most steps of a body.
    pub const MAX_STEPS: usize = 64;
    /// The most values of a body.
    pub const MAX_SLOTS: usize = 200;
    /// The most dims of all its values together, so that a byte numbers factors.
    const MAX_DIMS: usize = 160;

    /// Steps on operands of these types, and which values are its results.
    pub fn new(
        operands: impl IntoIterator<Item = DType>,
        steps: Vec<Step>,
        results: impl IntoIterator<Item = Slot>,
    ) -> Result<Body, BodyError> {
        let (operands, results): (SmallVec<[DType; 4]>, SmallVec<[Slot; 4]>) =
            (operands.into_iter().collect(), results.into_iter().collect());
        if steps.is_empty() || steps.len() > Body::MAX_STEPS {
            return Err(BodyError::Steps { limit: Body::MAX_STEPS, found: steps.len() });
        }
        let n = operands.len() + steps.iter().map(|it| usize::from(it.n_results)).sum::<usize>();
        if n > Body::MAX_SLOTS {
            return Err(BodyError::Slots { limit: Body::MAX_SLOTS, found: n });
        }
        let mut there = operands.len();
        for step in &steps {
            if matches!(step.op, Op::Fused(_) | Op::Collective(_) | Op::Reshard(_)) {
                return Err(BodyError::Op { op: step.op.kind().name() });
            }
            if let Some(&slot) = step.inputs.iter().find(|it| usize::from(**it) >= there) {
                return Err(BodyError::Unknown { slot: slot.into() });
            }
            there += usize::from(step.n_results);
        }
        let is_read = |slot: usize| steps.iter().any(|it| it.inputs.contains(&(slot as Slot)));
        if let Some(slot) = (0..operands.len()).find(|&it| !is_read(it)) {
            return Err(BodyError::Unread { slot });
        }
        if results.is_empty() {
            return Err(BodyError::NoResult);
        }
        let made = operands.len()..there;
        for (i, &slot) in results.iter().enumerate() {
            if !made.contains(&slot.into()) || results[..i].contains(&slot) {
                return Err(BodyError::Result { slot: slot.into() });
            }
        }
        let mut hasher = FxHasher::default();
        (&operands, &steps, &results).hash(&mut hasher);
        let mut data = BodyData {
            name: name(&steps),
            operands,
            steps,
            results,
            in_place: Vec::new(),
            first_gradients: Vec::new(),
            hash: hasher.finish(),
        };
        data.in_place = data.pairs_in_place();
        data.first_gradients = data.all_first_gradients();
        Ok(Body(Arc::new(data)))
    }

    /// Types of the operands' elements.
    pub fn operands(&self) -> &[DType] {
        &self.0.operands
    }

    /// The steps, in order.
    pub fn steps(&self) -> &[Step] {
        &self.0.steps
    }

    /// The values that are results.
    pub fn results(&self) -> &[Slot] {
        &self.0.results
    }

    /// The names of its ops but for casts, each once: `glu+amax`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The step that makes a value, and which of its results it is; `None` for an operand.
    pub fn maker(&self, slot: Slot) -> Option<(&Step, usize)> {
        let (step, index) = self.0.maker(slot)?;
        Some((&self.0.steps[step], index))
    }

    /// The steps, each with the number of its first result.
    pub fn numbered(&self) -> impl Iterator<Item = (Slot, &Step)> {
        self.0.numbered()
    }

    /// The same with ops that `f` replaces; `None` if it replaces none.
    pub fn replaced(&self, f: impl Fn(Slot, &Step) -> Option<Op>) -> Option<Body> {
        let ops: SmallVec<[Option<Op>; 8]> = self.numbered().map(|it| f(it.0, it.1)).collect();
        if ops.iter().all(Option::is_none) {
            return None;
        }
        let steps = self.steps().iter().zip(ops);
        let steps = steps.map(|(step, op)| match op {
            Some(op) => Step { op, ..step.clone() },
            None => step.clone(),
        });
        let body = Body::new(self.0.operands.clone(), steps.collect(), self.0.results.clone());
        Some(body.expect("slots are the same"))
    }

    /// The number of the body's result that a value is.
    pub fn result_of(&self, slot: Slot) -> Option<usize> {
        self.0.result_of(slot)
    }

    pub(super) fn in_place(&self) -> &[(usize, usize)] {
        &self.0.in_place
    }

    pub(super) fn first_gradients(&self) -> &[usize] {
        &self.0.first_gradients
    }

    /// Types of all values, where operands have these.
    pub(super) fn types(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, TypeError> {
        arity(inputs, self.0.operands.len())?;
        for (operand, (ty, &dtype)) in inputs.iter().zip(&self.0.operands).enumerate() {
            if ty.dtype != dtype {
                return Err(TypeError::DType {
                    operand,
                    found: ty.dtype,
                    expected: "as its body says",
                });
            }
        }
        let mut res: Vec<TensorType> = inputs.iter().map(|&it| it.clone()).collect();
        for step in &self.0.steps {
            let made = {
                let inputs = of(&res, &step.inputs);
                let fail = |source| TypeError::Step {
                    op: step.op.kind().name(),
                    source: Box::new(source),
                };
                let made = step.op.infer(&inputs).map_err(fail)?;
                check(self, step, res.len() as Slot, &inputs, &made).map_err(fail)?;
                made
            };
            res.extend(made);
        }
        if res.iter().map(TensorType::ndim).sum::<usize>() > Body::MAX_DIMS {
            return Err(TypeError::Attribute {
                why: "the values of a body have more than 160 dims",
            });
        }
        Ok(res)
    }

    /// Runs the steps on one rank's operands, each by `run`. A value that another step reads is rounded to its type; a
    /// result is not, if it is not read.
    pub fn run<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        mut run: impl FnMut(&Op, &[View<'_, T>], &mut [ViewMut<'_, T>]),
    ) {
        let types: Vec<TensorType> = (inputs.iter().zip(self.operands()))
            .map(|(it, &dtype)| TensorType {
                dtype,
                shape: it.shape.iter().map(|&it| it as u64).collect(),
            })
            .collect();
        let types = self.types(&types.iter().collect::<Vec<_>>()).expect("operands fit");
        let shapes: Vec<SmallVec<[usize; 4]>> =
            types.iter().map(|it| it.shape.iter().map(|&it| it as usize).collect()).collect();
        let mut values: Vec<Vec<T>> = vec![Vec::new(); inputs.len()];
        for (first, step) in self.numbered() {
            let made = usize::from(first)..usize::from(first + step.n_results);
            let size = |it: usize| shapes[it].iter().product();
            let mut outs: SmallVec<[Vec<T>; 4]> =
                made.clone().map(|it| vec![T::nan(); size(it)]).collect();
            {
                let view = |&it: &Slot| match inputs.get(usize::from(it)) {
                    Some(&operand) => operand,
                    None => {
                        View { shape: &shapes[usize::from(it)], data: &values[usize::from(it)] }
                    }
                };
                let views: SmallVec<[View<'_, T>; 4]> = step.inputs.iter().map(view).collect();
                let made = outs.iter_mut().zip(&shapes[made.clone()]);
                let mut made: SmallVec<[ViewMut<'_, T>; 4]> =
                    made.map(|(data, shape)| ViewMut { shape, data }).collect();
                run(&step.op, &views, &mut made);
            }
            for (slot, mut out) in made.zip(outs) {
                if let Some(result) = self.result_of(slot as Slot) {
                    results[result].data.copy_from_slice(&out);
                }
                if self.0.is_read(slot as Slot) {
                    round(types[slot].dtype, &mut out);
                }
                values.push(out);
            }
        }
    }
}

/// Checks what a step must be besides well-typed.
fn check(
    body: &Body,
    step: &Step,
    first: Slot,
    inputs: &[&TensorType],
    made: &Types,
) -> Result<(), TypeError> {
    let attribute = |why| Err(TypeError::Attribute { why });
    if made.len() != usize::from(step.n_results) {
        return attribute("a step names each of its results");
    }
    if let Some((found, limit)) = made.iter().find_map(|it| Some((it, it.exceeds()?))) {
        return Err(TypeError::TooLarge { found: found.clone(), limit });
    }
    if !step.op.bounds(inputs).is_empty() {
        return attribute("a step must not depend on which part of a tensor a rank holds");
    }
    let shapes: SmallVec<[&[u64]; 2]> = made.iter().map(|it| it.shape.as_slice()).collect();
    let all = (first..first + step.n_results).all(|it| body.result_of(it).is_some());
    if !all && step.op.localize(&shapes).is_some() {
        return attribute("the results of a step whose attributes are sizes must be returned");
    }
    Ok(())
}

/// Types of these slots.
pub(super) fn of<'a>(types: &'a [TensorType], slots: &[Slot]) -> SmallVec<[&'a TensorType; 4]> {
    slots.iter().map(|&it| &types[usize::from(it)]).collect()
}

/// Rounds to what is stored as `dtype`.
fn round<T: Real>(dtype: DType, x: &mut [T]) {
    match dtype {
        DType::F32 | DType::I32 => (),
        DType::Bf16 => x.iter_mut().for_each(|it| {
            let bits = (it.to_f64() as f32).to_bits();
            // To nearest even; what is no number stays so.
            let up = if it.is_nan() { 0 } else { 0x7fff + (bits >> 16 & 1) };
            *it = T::from_f64(f32::from_bits(bits.wrapping_add(up) & 0xffff_0000).into());
        }),
        DType::E4M3 | DType::E5M2 => {
            let format = dtype.fp8().expect("it is FP8");
            x.iter_mut().for_each(|it| {
                *it = T::from_f64(format.decode(format.encode(it.to_f64() as f32)).into());
            });
        }
    }
}

fn name(steps: &[Step]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for kind in steps.iter().map(|it| it.op.kind()).filter(|it| *it != OpKind::Cast) {
        if !names.contains(&kind.name()) {
            names.push(kind.name());
        }
    }
    if names.is_empty() { OpKind::Cast.name().to_string() } else { names.join("+") }
}

impl BodyData {
    fn numbered(&self) -> impl Iterator<Item = (Slot, &Step)> {
        self.steps.iter().scan(self.operands.len() as Slot, |next, step| {
            let first = *next;
            *next += step.n_results;
            Some((first, step))
        })
    }

    fn maker(&self, slot: Slot) -> Option<(usize, usize)> {
        let mut steps = self.numbered().enumerate();
        steps.find_map(|(i, (first, step))| {
            (first..first + step.n_results).contains(&slot).then(|| (i, usize::from(slot - first)))
        })
    }

    fn result_of(&self, slot: Slot) -> Option<usize> {
        self.results.iter().position(|&it| it == slot)
    }

    fn is_read(&self, slot: Slot) -> bool {
        self.steps.iter().any(|it| it.inputs.contains(&slot))
    }

    /// Results in the memory of operands: as the one step has them that reads operands, or as several have whose results
    /// follow, element by element, from what operands have at the same place.
    fn pairs_in_place(&self) -> Vec<(usize, usize)> {
        let n = self.operands.len() as Slot;
        let readers = || self.steps.iter().filter(|it| it.inputs.iter().any(|&it| it < n));
        if readers().count() > 1 && !readers().all(|it| it.op.is_map()) {
            return Vec::new();
        }
        let mut res: Vec<(usize, usize)> = Vec::new();
        let free = |res: &[(usize, usize)], operand: Slot| {
            operand < n && !res.iter().any(|it| it.1 == usize::from(operand))
        };
        // Operands of whose type and shape the step says that a result is.
        let own = |result: usize| -> SmallVec<[Slot; 2]> {
            let Some((step, index)) = self.maker(self.results[result]) else {
                return SmallVec::new();
            };
            let step = &self.steps[step];
            let pairs = step.op.in_place().iter().filter(|it| it.0 == index);
            pairs.filter_map(|it| step.inputs.get(it.1).copied()).filter(|it| *it < n).collect()
        };
        for result in 0..self.results.len() {
            if let Some(&operand) = own(result).iter().find(|it| free(&res, **it)) {
                res.push((result, operand.into()));
            }
        }
        // Results whose operand another has may take one of its kind.
        let dtype = |operand: Slot| self.operands[usize::from(operand)];
        for result in (0..self.results.len()).filter(|it| !own(*it).is_empty()) {
            let of = own(result)[0];
            let fits =
                |&it: &Slot| dtype(it) == dtype(of) && free(&res, it) && self.is_like(it, of);
            if res.iter().all(|it| it.0 != result)
                && let Some(operand) = (0..n).find(fits)
            {
                res.push((result, operand.into()));
            }
        }
        res
    }

    /// Returns true if a step says that two operands have one shape.
    fn is_like(&self, a: Slot, b: Slot) -> bool {
        self.steps
            .iter()
            .any(|it| it.inputs.contains(&a) && it.inputs.contains(&b) && it.op.is_map())
    }

    fn all_first_gradients(&self) -> Vec<usize> {
        let slots = self.numbered().flat_map(|(first, step)| {
            let own = step.op.first_gradients().iter().filter(|it| **it < step.n_results.into());
            own.map(move |&it| first + it as Slot)
        });
        slots.filter_map(|it| self.result_of(it)).collect()
    }
}

impl PartialEq for Body {
    fn eq(&self, other: &Body) -> bool {
        let (a, b) = (&*self.0, &*other.0);
        Arc::ptr_eq(&self.0, &other.0)
            || a.hash == b.hash
                && a.operands == b.operands
                && a.steps == b.steps
                && a.results == b.results
    }
}

impl Eq for Body {}

impl Hash for Body {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Body({self})")
    }
}

/// On one line: `(bf16) { %1 = activation(kind:relu) %0; return %1 }`.
impl fmt::Display for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, [" ", "; ", " "])
    }
}

impl Body {
    /// Writes it with `between` in front of the first step, between steps, and behind the last.
    pub(crate) fn write(&self, f: &mut impl fmt::Write, between: [&str; 3]) -> fmt::Result {
        let list = |slots: &[Slot]| {
            let names: Vec<String> = slots.iter().map(|it| format!("%{it}")).collect();
            names.join(", ")
        };
        let operands: Vec<&str> = self.operands().iter().map(|it| it.name()).collect();
        write!(f, "({}) {{{}", operands.join(", "), between[0])?;
        for (first, step) in self.numbered() {
            let made: Vec<Slot> = (first..first + step.n_results).collect();
            let space = if step.inputs.is_empty() { "" } else { " " };
            let (made, op, inputs) = (list(&made), step.op.to_text(), list(&step.inputs));
            write!(f, "{made} = {op}{space}{inputs}{}", between[1])?;
        }
        write!(f, "return {}{}}}", list(self.results()), between[2])
    }

    /// The sum of what `f` says of each step, by the sizes of its operands and results; 0 if operands of these sizes do
    /// not fit.
    pub(super) fn sum(
        &self,
        inputs: &[&[u64]],
        f: impl Fn(&Op, &[&[u64]], &[&[u64]]) -> u64,
    ) -> u64 {
        let types: Vec<TensorType> = (inputs.iter().zip(self.operands()))
            .map(|(it, &dtype)| TensorType::new(dtype, it))
            .collect();
        let Ok(types) = self.types(&types.iter().collect::<Vec<_>>()) else { return 0 };
        let shapes = |it: &mut dyn Iterator<Item = Slot>| -> Vec<&[u64]> {
            it.map(|it| types[usize::from(it)].shape.as_slice()).collect()
        };
        let of_step = |(first, step): (Slot, &Step)| {
            let inputs = shapes(&mut step.inputs.iter().copied());
            f(&step.op, &inputs, &shapes(&mut (first..first + step.n_results)))
        };
        self.numbered().map(of_step).fold(0, u64::saturating_add)
    }
}
