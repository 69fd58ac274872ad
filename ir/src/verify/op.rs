//! Checks of one op on operands and results of given types and shardings, each made once.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::ops::{CollectiveKind, Conflict, Op, Types};
use crate::placement::{self, AxisSet, Mesh, Sharding};
use crate::types::TensorType;
use crate::verify::Property;

/// A type and a sharding, interned.
pub(super) type Class = u32;

/// What checks know already.
pub(super) struct Checker<'a> {
    mesh: &'a Mesh,
    /// Attributes of ops are local.
    local: bool,
    classes: Vec<ClassData<'a>>,
    class_of: FxHashMap<(&'a TensorType, &'a Sharding), Class>,
    ops: FxHashMap<OpKey<'a>, usize>,
    verdicts: Vec<Vec<Fault>>,
    parts: FxHashMap<(CollectiveKind, AxisSet, Class, Class), Option<Fault>>,
}

/// What is wrong with a use of an op, and of which kind that is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    /// [`Property::Types`], or [`Property::Reductions`] where it is about partial values.
    pub property: Property,
    pub message: String,
}

struct ClassData<'a> {
    ty: &'a TensorType,
    sharding: &'a Sharding,
    local: TensorType,
}

#[derive(PartialEq, Eq, Hash)]
struct OpKey<'a> {
    op: &'a Op,
    inputs: SmallVec<[Class; 4]>,
    results: SmallVec<[Class; 4]>,
}

impl<'a> Checker<'a> {
    /// Nothing is known. Where `attributes` are local, ops are those of phase `Local`.
    pub(super) fn new(mesh: &'a Mesh, attributes: Attributes) -> Checker<'a> {
        Checker {
            mesh,
            local: attributes == Attributes::Local,
            classes: Vec::new(),
            class_of: FxHashMap::default(),
            ops: FxHashMap::default(),
            verdicts: Vec::new(),
            parts: FxHashMap::default(),
        }
    }

    /// Interns a type with a valid sharding.
    pub(super) fn class(
        &mut self,
        ty: &'a TensorType,
        sharding: &'a Sharding,
    ) -> Result<Class, placement::PlacementError> {
        if let Some(&class) = self.class_of.get(&(ty, sharding)) {
            return Ok(class);
        }
        sharding.validate(&ty.shape, self.mesh)?;
        let shape = sharding.local_shape(&ty.shape, self.mesh);
        let class = self.classes.len() as Class;
        let local = TensorType { dtype: ty.dtype, shape };
        self.classes.push(ClassData { ty, sharding, local });
        self.class_of.insert((ty, sharding), class);
        Ok(class)
    }

    /// Bytes of one rank's part.
    pub(super) fn local_bytes(&self, class: Class) -> u64 {
        self.classes[class as usize].local.bytes()
    }

    /// What is wrong with a use of `op`, which is no collective.
    pub(super) fn op(&mut self, op: &'a Op, inputs: &[Class], results: &[Class]) -> &[Fault] {
        let (inputs, results) = (SmallVec::from_slice(inputs), SmallVec::from_slice(results));
        let key = OpKey { op, inputs, results };
        let known = self.ops.get(&key).copied();
        let index = known.unwrap_or_else(|| {
            self.verdicts.push(self.check(&key));
            self.ops.insert(key, self.verdicts.len() - 1);
            self.verdicts.len() - 1
        });
        &self.verdicts[index]
    }

    /// What is wrong with one part of a collective.
    pub(super) fn part(
        &mut self,
        kind: CollectiveKind,
        axes: AxisSet,
        from: Class,
        to: Class,
    ) -> Option<&Fault> {
        if !self.parts.contains_key(&(kind, axes, from, to)) {
            let verdict = self.check_part(kind, axes, from, to);
            self.parts.insert((kind, axes, from, to), verdict);
        }
        self.parts[&(kind, axes, from, to)].as_ref()
    }

    fn check(&self, key: &OpKey<'_>) -> Vec<Fault> {
        let mut errors = Vec::new();
        let out_of_range = key.op.numbers().into_iter().filter_map(|it| it.check().err());
        errors.extend(out_of_range.map(|it| Fault::of_types(it.to_string())));
        if !errors.is_empty() {
            return errors;
        }
        let all = |of: &[Class]| -> SmallVec<[&ClassData<'_>; 4]> {
            of.iter().map(|&it| &self.classes[it as usize]).collect()
        };
        let (inputs, results) = (all(&key.inputs), all(&key.results));
        let global = match self.local {
            // Sizes of results say which op this was before it was made local.
            true => {
                let error = infer_error(key.op, &inputs, &results, |it| &it.local, "on one rank, ");
                errors.extend(error.map(Fault::of_types));
                let shapes: SmallVec<[&[u64]; 4]> =
                    results.iter().map(|it| it.ty.shape.as_slice()).collect();
                key.op.localize(&shapes)
            }
            false => None,
        };
        let op = global.as_ref().unwrap_or(key.op);
        if let Some(error) = infer_error(op, &inputs, &results, |it| it.ty, "") {
            errors.push(Fault::of_types(error));
            return errors;
        }
        if !matches!(op, Op::Reshard(_)) {
            errors.extend(self.placement_errors(op, &inputs, &results));
        }
        errors
    }

    /// Whether operands meet, and make results sharded as they say.
    fn placement_errors(
        &self,
        op: &Op,
        inputs: &[&ClassData<'_>],
        results: &[&ClassData<'_>],
    ) -> Vec<Fault> {
        let input_types: SmallVec<[&TensorType; 4]> = inputs.iter().map(|it| it.ty).collect();
        let result_types: SmallVec<[&TensorType; 4]> = results.iter().map(|it| it.ty).collect();
        let factors = op.factors(&input_types, &result_types);
        let shardings: SmallVec<[&Sharding; 4]> = inputs.iter().map(|it| it.sharding).collect();
        let mut assignment = match factors.assign(&shardings, self.mesh) {
            Ok(it) => it,
            Err(conflict) => {
                // What is to be reduced is looked at even so.
                let partial = |it: &&ClassData<'_>| Sharding {
                    partial: it.sharding.partial,
                    ..Sharding::replicated(it.sharding.ndim())
                };
                let partial: SmallVec<[Sharding; 4]> = inputs.iter().map(partial).collect();
                let partial: SmallVec<[&Sharding; 4]> = partial.iter().collect();
                let also = factors.assign(&partial, self.mesh).err();
                let also = also.filter(|it| *it != conflict);
                return std::iter::once(conflict).chain(also).map(Fault::from).collect();
            }
        };
        // What only results have is theirs to choose; that it is only theirs is seen below.
        for (dims, result) in factors.results.iter().zip(results) {
            factors.adopt(&mut assignment, dims, result.sharding, self.mesh);
        }
        let mut errors = Vec::new();
        let mut expect = |what: &str, index: usize, made: Option<Sharding>, found: &Sharding| {
            if made.as_ref() != Some(found) {
                let show = |it: &Sharding| it.display(self.mesh).to_string();
                let made_text = made.as_ref().map_or("no layout".to_string(), show);
                let found_text = show(found);
                let property = about(made.is_some_and(|it| it.partial != found.partial));
                let message =
                    format!("{what} {index} is {found_text}, where the op has it as {made_text}");
                errors.push(Fault { property, message });
            }
        };
        for (i, input) in inputs.iter().enumerate() {
            expect("operand", i, factors.input(i, &assignment, self.mesh), input.sharding);
        }
        for (i, result) in results.iter().enumerate() {
            expect("result", i, factors.result(i, &assignment, self.mesh), result.sharding);
        }
        errors
    }

    fn check_part(
        &self,
        kind: CollectiveKind,
        axes: AxisSet,
        from: Class,
        to: Class,
    ) -> Option<Fault> {
        let (from, to) = (&self.classes[from as usize], &self.classes[to as usize]);
        if from.ty != to.ty {
            return Some(Fault::of_types(format!("moves {} to {}", from.ty, to.ty)));
        }
        let step = placement::classify(from.sharding, to.sharding, &from.ty.shape, self.mesh);
        let show = |it: &Sharding| it.display(self.mesh).to_string();
        let (was, is) = (show(from.sharding), show(to.sharding));
        let partial = from.sharding.partial.is_some() || to.sharding.partial.is_some();
        let property = about(partial || kind.reduce().is_some());
        let Some(step) = step else {
            return Some(Fault {
                property,
                message: format!("no one step leads from {was} to {is}"),
            });
        };
        let expected = (CollectiveKind::from(step), step.axes());
        if expected == (kind, axes) {
            return None;
        }
        let (kind, axes) = (expected.0, self.mesh.names(expected.1));
        Some(Fault { property, message: format!("{was} to {is} is {kind} over ({axes})") })
    }
}

impl Fault {
    fn of_types(message: String) -> Fault {
        Fault { property: Property::Types, message }
    }
}

impl From<Conflict> for Fault {
    fn from(it: Conflict) -> Fault {
        let partial = match it {
            Conflict::Partial { .. } => true,
            Conflict::Disagree { .. }
            | Conflict::AxisTwice { .. }
            | Conflict::Whole { .. }
            | Conflict::Uneven { .. }
            | Conflict::Strided { .. }
            | Conflict::Straddles { .. } => false,
        };
        Fault { property: about(partial), message: it.to_string() }
    }
}

fn about(partial: bool) -> Property {
    match partial {
        true => Property::Reductions,
        false => Property::Types,
    }
}

/// Whose sizes the attributes of ops mention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attributes {
    /// Those of global tensors.
    Global,
    /// Those of one rank's parts.
    Local,
}

/// What is wrong with the types of an op's operands and results.
fn infer_error<'a, 'b>(
    op: &Op,
    inputs: &[&'b ClassData<'a>],
    results: &[&'b ClassData<'a>],
    ty: impl Fn(&'b ClassData<'a>) -> &'b TensorType,
    on: &str,
) -> Option<String> {
    let inputs: SmallVec<[&TensorType; 4]> = inputs.iter().map(|it| ty(it)).collect();
    types_error(op, &inputs, results.iter().map(|it| ty(it)), on)
}

/// Whether `op` makes these results of these operands; `on` says where, for the message.
pub(super) fn types_error<'b>(
    op: &Op,
    inputs: &[&TensorType],
    results: impl Iterator<Item = &'b TensorType>,
    on: &str,
) -> Option<String> {
    let made = match op.infer(inputs) {
        Ok(it) => it,
        Err(error) => return Some(format!("{on}{error}")),
    };
    let results: Types = results.cloned().collect();
    let show =
        |it: &[TensorType]| it.iter().map(|it| it.to_string()).collect::<Vec<_>>().join(", ");
    (made != results).then(|| format!("{on}makes {}, not {}", show(&made), show(&results)))
}
