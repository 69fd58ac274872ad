//! `Block`: a module made of plain ops, as text IR spells them.
//!
//! ```ron
//! Block(
//!     name: "gated",
//!     inputs: ["x"],
//!     params: {"w.weight": (shape: [64, 64], placements: {"tp": Shard(0)})},
//!     ops: [
//!         (op: "matmul(transpose_b:true)", inputs: ["x", "w.weight"], outputs: ["h"]),
//!         (op: "activation(kind:silu)", inputs: ["h"], outputs: ["y"]),
//!     ],
//!     outputs: ["y"],
//!     placements: {"y": At({"dp": Shard(0), "tp": Shard(2)})},
//! )
//! ```

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::{Common, ModuleDef};
use crate::graph::Init;
use crate::model::attributes::read_op;
use crate::model::elaborate::{Cx, Values};
use crate::model::error::{ModelError, Problem};
use crate::model::params::ParamSpec;
use crate::model::range::{Fields, MAX_SIZE};
use crate::model::schema::{Ordered, ParamOptions, Placements};
use crate::ops::Op;
use crate::{DType, Value};

module! {
    /// See the [module docs](self).
    pub struct Block {
        /// What it calls the tensors that it reads.
        pub inputs: Vec<String>,
        /// Its parameters, by local name.
        #[serde(default)]
        pub params: Ordered<BlockParam>,
        /// Its ops, in order.
        pub ops: Vec<BlockOp>,
        /// The values that it makes for the next module.
        pub outputs: Vec<String>,
        /// Where some of its values live.
        #[serde(default)]
        pub placements: Ordered<ValuePlacement>,
    }
}

/// A parameter of a block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockParam {
    /// Global shape.
    pub shape: Vec<u64>,
    /// How it starts; the model's `init` by default.
    #[serde(default)]
    pub init: Option<Init>,
    /// Element type of the master weight.
    #[serde(default)]
    pub dtype: Option<DType>,
    /// Where it lives, by mesh axis.
    #[serde(default)]
    pub placements: Option<Placements>,
    /// The dimension that FSDP shards.
    #[serde(default)]
    pub fsdp_dim: Option<usize>,
    /// Weight decay applies to it.
    #[serde(default)]
    pub decay: Option<bool>,
    /// It is trained.
    #[serde(default)]
    pub trainable: Option<bool>,
}

/// One application of an op.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockOp {
    /// The op with its attributes, in text IR: `matmul(transpose_b:true)`.
    pub op: String,
    /// Its operands.
    pub inputs: Vec<String>,
    /// Names for its results.
    pub outputs: Vec<String>,
}

/// Where a value of a block lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ValuePlacement {
    /// Like the residual stream: batch over data-parallel axes, sequence over the tensor-parallel
    /// one under sequence parallelism.
    Stream,
    /// By mesh axis; axes left out replicate.
    At(Placements),
}

impl ModuleDef for Block {
    fn common(&self) -> Common<'_> {
        self.common_options()
    }

    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        for (i, name) in self.inputs.iter().enumerate() {
            fields.name(&format!("inputs[{i}]"), name)?;
        }
        for (name, param) in &self.params.0 {
            let field = format!("params[\"{name}\"]");
            fields.name(&field, name)?;
            param.check(&fields.of(&field))?;
        }
        for (i, op) in self.ops.iter().enumerate() {
            let fields = fields.of(&format!("ops[{i}]"));
            op.outputs.iter().try_for_each(|it| fields.name("outputs", it))?;
        }
        Ok(())
    }

    fn build(&self, cx: &mut Cx<'_>, inputs: Values) -> Result<Values, ModelError> {
        if inputs.len() != self.inputs.len() {
            let (module, expected) = (cx.title(), format!("{} tensors", self.inputs.len()));
            return Err(
                cx.error("inputs", Problem::Inputs { module, expected, found: inputs.len() })
            );
        }
        let mut known: FxHashMap<&str, Value> = FxHashMap::default();
        for (i, (name, value)) in self.inputs.iter().zip(inputs).enumerate() {
            declare(cx, &mut known, name, value, &format!("inputs[{i}]"))?;
        }
        if let Some(labels) = cx.labels {
            known.entry("labels").or_insert(labels);
        }
        for (name, param) in &self.params.0 {
            let value = cx.at(&format!("params[\"{name}\"]"), |cx| param.declare(cx, name))?;
            declare(cx, &mut known, name, value, &format!("params[\"{name}\"]"))?;
        }
        for (i, it) in self.ops.iter().enumerate() {
            let results = cx.at(&format!("ops[{i}]"), |cx| it.apply(cx, &known))?;
            for (name, value) in it.outputs.iter().zip(results) {
                declare(cx, &mut known, name, value, &format!("ops[{i}].outputs"))?;
            }
        }
        for (name, placement) in &self.placements.0 {
            let value = look_up(cx, &known, name, "placements")?;
            match placement {
                ValuePlacement::Stream => cx.pin_stream(value)?,
                ValuePlacement::At(placements) => {
                    let ndim = cx.ty(value).ndim();
                    let at = cx.here(&format!("placements[\"{name}\"]"));
                    let sharding = cx.placements(name, placements, ndim, &at)?;
                    cx.builder.pin(value, sharding.without_unit_axes(&cx.layout.mesh));
                }
            }
        }
        self.outputs.iter().map(|it| look_up(cx, &known, it, "outputs")).collect()
    }
}

impl BlockParam {
    fn check(&self, fields: &Fields) -> Result<(), ModelError> {
        for (i, &it) in self.shape.iter().enumerate() {
            fields.size(&format!("shape[{i}]"), it)?;
        }
        fields.init("init", self.init)
    }

    fn declare(&self, cx: &mut Cx<'_>, name: &str) -> Result<Value, ModelError> {
        let options = ParamOptions {
            init: self.init,
            dtype: self.dtype,
            placements: self.placements.clone(),
            fsdp_dim: self.fsdp_dim,
            decay: self.decay,
            trainable: self.trainable,
        };
        let mut spec = ParamSpec::new(name, &self.shape, cx.model.init);
        spec.options = Some(("", &options));
        cx.param(spec)
    }
}

impl BlockOp {
    fn apply(
        &self,
        cx: &mut Cx<'_>,
        known: &FxHashMap<&str, Value>,
    ) -> Result<SmallVec<[Value; 2]>, ModelError> {
        let fail = |cx: &Cx<'_>, field: &str, why: String| {
            cx.error(field, Problem::Op { block: cx.title(), why })
        };
        let op = read_op(cx, &self.op)?;
        check_numbers(cx, &op)?;
        let inputs = self.inputs.iter().enumerate();
        let inputs = inputs.map(|(i, it)| look_up(cx, known, it, &format!("inputs[{i}]")));
        let inputs = inputs.collect::<Result<Values, _>>()?;
        let n_results = {
            let types: SmallVec<[_; 4]> = inputs.iter().map(|&it| cx.ty(it)).collect();
            op.infer(&types).map_or(self.outputs.len(), |it| it.len())
        };
        if self.outputs.is_empty() {
            let why = "an op needs a name for each of its results".to_string();
            return Err(fail(cx, "outputs", why));
        }
        if n_results != self.outputs.len() {
            let why =
                format!("`{}` has {n_results} results, and {} names", self.op, self.outputs.len());
            return Err(fail(cx, "outputs", why));
        }
        let names: SmallVec<[&str; 2]> = self.outputs.iter().map(String::as_str).collect();
        cx.at("op", |cx| cx.ops(&names, op, &inputs))
    }
}

/// Gives a value its name in the block, which no other value there has.
fn declare<'a>(
    cx: &Cx<'_>,
    known: &mut FxHashMap<&'a str, Value>,
    name: &'a str,
    value: Value,
    field: &str,
) -> Result<(), ModelError> {
    match known.insert(name, value) {
        None => Ok(()),
        Some(_) => {
            let why = format!("two values are called `{name}`; give one of them another name");
            Err(cx.error(field, Problem::Op { block: cx.title(), why }))
        }
    }
}

fn look_up(
    cx: &Cx<'_>,
    known: &FxHashMap<&str, Value>,
    name: &str,
    field: &str,
) -> Result<Value, ModelError> {
    known.get(name).copied().ok_or_else(|| {
        let mut names: Vec<String> = known.keys().map(|it| it.to_string()).collect();
        names.sort();
        let (block, name) = (cx.title(), name.to_string());
        cx.error(field, Problem::UnknownValue { block, name, known: names })
    })
}

/// Refuses attributes that are no number, or no dimension or size that a tensor can have.
fn check_numbers(cx: &Cx<'_>, op: &Op) -> Result<(), ModelError> {
    let (text, name) = (op.to_text(), op.kind().name());
    let fail = |what: &str, found: &str, expected: &str| {
        let (found, expected) = (found.to_string(), expected.to_string());
        let field = format!("{what} of `{name}`");
        Err(cx.error("op", Problem::Range { field, found, expected }))
    };
    // Attributes are numbers and words of closed lists, none of which is `inf`.
    let mut words = text.split(|it: char| !it.is_alphanumeric());
    if let Some(found) = words.find(|it| matches!(*it, "inf" | "NaN")) {
        return fail("an attribute", found, "finite");
    }
    for rest in text.split("dim:").skip(1) {
        let digits = rest.split(|it: char| !it.is_ascii_digit()).next().unwrap_or_default();
        if digits.parse::<u64>().is_ok_and(|it| it > MAX_SIZE) {
            return fail("a dimension", digits, "at most 2^40");
        }
    }
    Ok(())
}
