//! [`Digest`]: the BLAKE3 hash of a model or of a plan.
//!
//! A model's digest covers the text of its logical graph after `--set`. It leaves out the mesh and everything that only
//! places data or schedules work: layouts, FSDP units, recomputation. It does not depend on the order of fields, on
//! comments, or on whether the layers are in a `Repeat` or written one by one. It changes with every op, size, name
//! and init, and with the optimizer, the batch and the schedule.
//!
//! A plan's digest covers its text without the `digest` line.

use std::fmt;
use std::str::FromStr;

use cranelift_entity::{EntityRef, PrimaryMap, SecondaryMap};
use serde::{Serialize, Serializer};

use crate::graph::{Graph, Scope, ScopeData};
use crate::placement::Mesh;
use crate::plan::Plan;
use crate::text::{plan_without_digest, print_graph};

/// See the [module docs](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of a model that was elaborated, in phase `Logical`.
    pub fn of_model(graph: &Graph) -> Digest {
        let mut graph = graph.clone();
        graph.mesh = Mesh::default();
        graph.weight_mesh = None;
        for value in graph.values.values_mut() {
            value.sharding = None;
            value.pinned = false;
        }
        for param in &mut graph.params {
            param.placed = false;
            param.label = None;
        }
        // Only the recipe of a scope changes the computation, so one scope for each recipe remains.
        let mut recipes: PrimaryMap<Scope, ScopeData> = PrimaryMap::new();
        let mut scopes: SecondaryMap<Scope, Scope> = SecondaryMap::with_default(Scope::new(0));
        for (scope, data) in &graph.scopes {
            let known = recipes.iter().find(|it| it.1.recipe == data.recipe).map(|it| it.0);
            scopes[scope] = known.unwrap_or_else(|| {
                let recipe = data.recipe.clone();
                recipes.push(ScopeData { recipe, ..ScopeData::default() })
            });
        }
        graph.scopes = recipes;
        graph.nodes.values_mut().for_each(|it| it.scope = scopes[it.scope]);
        graph.params.iter_mut().for_each(|it| it.scope = scopes[it.scope]);
        Digest::of(&print_graph(&graph))
    }

    /// The digest of a plan.
    pub fn of_plan(plan: &Plan) -> Digest {
        Digest::of(&plan_without_digest(plan))
    }

    pub(crate) fn of(text: &str) -> Digest {
        Digest(*blake3::hash(text.as_bytes()).as_bytes())
    }
}

/// 64 hexadecimal digits.
impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|it| write!(f, "{it:02x}"))
    }
}

/// Text that is no digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a digest has 64 hexadecimal digits")]
pub struct DigestError;

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Digest, DigestError> {
        let mut res = [0; 32];
        if text.len() != 2 * res.len() || !text.bytes().all(|it| it.is_ascii_hexdigit()) {
            return Err(DigestError);
        }
        for (i, byte) in res.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(|_| DigestError)?;
        }
        Ok(Digest(res))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{MeshSpec, elaborate, parse_with};

    const MODEL: &str = include_str!("../../examples/llama-tiny.ron");

    #[track_caller]
    fn digest(source: &str, mesh: &str, set: &[(&str, &str)]) -> Digest {
        let model = parse_with(source, set).unwrap();
        Digest::of_model(&elaborate(&model, &MeshSpec::parse(mesh).unwrap()).unwrap())
    }

    #[test]
    fn the_digest_of_a_model_is_that_of_what_it_computes() {
        let expect = digest(MODEL, "1", &[]);
        for mesh in ["8", "2x4", "2x2x2"] {
            assert_eq!(digest(MODEL, mesh, &[]), expect, "{mesh}");
        }
        let commented =
            MODEL.replace("sequence: 32,", "/* tokens */ sequence: 32, // of a sample\n");
        assert_ne!(commented, MODEL);
        assert_eq!(digest(&commented, "2x4", &[]), expect);
        let moved = MODEL.replace("sequence: 32,", "");
        let moved = moved.replacen("layers: [", "sequence: 32, layers: [", 1);
        assert_eq!(digest(&moved, "2x4", &[]), expect);
        // Layouts and recomputation belong to the plan.
        for set in [("fsdp.reshard_after_forward", "false"), ("checkpoint", "Full")] {
            assert_eq!(digest(MODEL, "2x4", &[set]), expect, "{set:?}");
        }
        let other = [
            ("schedule.lr", "2e-3"),
            ("sequence", "64"),
            ("batch", "Global(16)"),
            ("init", "Normal(std: 0.03)"),
            ("optimizer", "Sgd()"),
            ("clip_norm", "2.0"),
            ("seed", "7"),
            ("frozen", "[\"*norm.weight\"]"),
            ("recipe", "DelayedScaling()"),
        ];
        for set in other {
            assert_ne!(digest(MODEL, "2x4", &[set]), expect, "{set:?}");
        }
    }

    #[test]
    fn a_digest_is_read_as_it_is_printed() {
        let digest = Digest::of("planc");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        assert_eq!("0g".repeat(32).parse::<Digest>(), Err(DigestError));
        assert_eq!("ab".parse::<Digest>(), Err(DigestError));
    }
}
