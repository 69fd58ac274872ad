//! [`Property`]: what is proved of a plan; [`Proof`]: what was checked for it, and what does not hold.

use serde::Serialize;

use crate::verify::VerifyError;

/// A promise that every plan keeps. `docs/verification.md` says how each is proved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Property {
    /// Names, handles and lists fit together.
    Program,
    /// Ops get and make what they take.
    Types,
    /// A partial value is reduced once.
    Reductions,
    /// Ranks meet in their collectives.
    Communication,
    /// Values are written once, before they are read.
    Values,
    /// Live buffers do not overlap.
    Lifetimes,
    /// Accesses are ordered.
    Races,
    /// Memory is as large as stated.
    Memory,
    /// Each optimizer gets one tensor that `step` makes. The proof does not show that it is the gradient.
    Gradients,
    /// States go from step to step.
    States,
    /// Checkpoints hold everything once.
    Checkpoint,
    /// There is code for every op.
    Kernels,
}

/// The limit of the proof, as a sentence without a full stop. It goes with every list of proved properties.
pub const NOT_PROVED: &str = "that the plan computes its model: a plan with two operands of one type \
    exchanged, such as the gradients of two weights of one shape, or with another attribute of an op, such as `theta` \
    of `rope`, is another plan that may keep all properties";

impl Property {
    /// All of them, in the order in which they are checked.
    pub const ALL: [Property; 12] = [
        Property::Program,
        Property::Types,
        Property::Reductions,
        Property::Communication,
        Property::Values,
        Property::Lifetimes,
        Property::Races,
        Property::Memory,
        Property::Gradients,
        Property::States,
        Property::Checkpoint,
        Property::Kernels,
    ];

    /// Its name in certificates.
    pub fn name(self) -> &'static str {
        match self {
            Property::Program => "program",
            Property::Types => "types",
            Property::Reductions => "reductions",
            Property::Communication => "communication",
            Property::Values => "values",
            Property::Lifetimes => "lifetimes",
            Property::Races => "races",
            Property::Memory => "memory",
            Property::Gradients => "gradients",
            Property::States => "states",
            Property::Checkpoint => "checkpoint",
            Property::Kernels => "kernels",
        }
    }

    /// What it says, as a sentence without a full stop.
    pub fn claim(self) -> &'static str {
        match self {
            Property::Program => "names, lists and data sizes fit together",
            Property::Types => "every op gets what it takes and makes what it says",
            Property::Reductions => "every partial value is reduced exactly once before use",
            Property::Communication => "ranks meet in every collective, at every coordinate",
            Property::Values => "every value is written once, and read after that",
            Property::Lifetimes => "no two live buffers overlap",
            Property::Races => "no two accesses to the same bytes race",
            Property::Memory => "arenas and peak are as stated",
            Property::Gradients => "each optimizer gets one tensor of its shape from `step`",
            Property::States => "every state is made, updated once a step, and used",
            Property::Checkpoint => "checkpoints hold every element exactly once",
            Property::Kernels => "every op has a kernel that takes its operands",
        }
    }
}

/// How many of what was looked at.
pub type Counts = Vec<(&'static str, u64)>;

/// What was checked of one property.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checked {
    /// The property.
    pub property: Property,
    /// What was looked at.
    pub counts: Counts,
}

/// What was checked of a plan, and what of it does not hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Proof {
    /// The properties, as far as they could be checked: where one is broken, others may make no sense.
    pub checked: Vec<Checked>,
    /// Counterexamples; none if the plan keeps its promises.
    pub broken: Vec<VerifyError>,
}

impl Proof {
    /// The first counterexample to a property.
    pub fn counterexample(&self, property: Property) -> Option<&VerifyError> {
        self.broken.iter().find(|it| it.property == Some(property))
    }

    /// Adds what was checked of a property.
    pub fn add(&mut self, property: Property, counts: Counts) {
        self.checked.push(Checked { property, counts });
    }
}
