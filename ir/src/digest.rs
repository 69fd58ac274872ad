//! [`Digest`]: the BLAKE3 hash of a model or of a plan.
//!
//! A model's digest covers the text of its logical graph after `--set`, and `weight_mesh` of what a recipe quantizes, in
//! the axes that the mesh has. It leaves out the rest of the mesh and everything that only places data or schedules
//! work: layouts, FSDP units, recomputation. It does not depend on the order of fields, on
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
use crate::quant::Recipe;
use crate::text::{plan_without_digest, print_graph};

/// See the [module docs](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of a model that was elaborated, in phase `Logical`.
    pub fn of_model(graph: &Graph) -> Digest {
        let declared = |scope: &ScopeData| -> Option<String> {
            let axes = scope.weight_mesh.or(graph.weight_mesh);
            let axes = axes.filter(|_| scope.recipe != Recipe::Bf16)?;
            Some(graph.mesh.in_user_axes(&graph.mesh.names(axes), ", "))
        };
        let weight_meshes: SecondaryMap<Scope, Option<String>> =
            graph.scopes.iter().map(|(scope, it)| (scope, declared(it))).collect();
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
        // Only the recipe of a scope and its `weight_mesh` change the computation, so one scope for each pair remains.
        let mut recipes: PrimaryMap<Scope, ScopeData> = PrimaryMap::new();
        let mut declared: Vec<&Option<String>> = Vec::new();
        let mut scopes: SecondaryMap<Scope, Scope> = SecondaryMap::with_default(Scope::new(0));
        for (scope, data) in &graph.scopes {
            let weight_mesh = &weight_meshes[scope];
            let mut known = recipes.iter().zip(&declared);
            let known = known.find(|it| it.0.1.recipe == data.recipe && *it.1 == weight_mesh);
            scopes[scope] = known.map(|it| it.0.0).unwrap_or_else(|| {
                let recipe = data.recipe.clone();
                declared.push(weight_mesh);
                recipes.push(ScopeData { recipe, ..ScopeData::default() })
            });
        }
        graph.scopes = recipes;
        graph.nodes.values_mut().for_each(|it| it.scope = scopes[it.scope]);
        graph.params.iter_mut().for_each(|it| it.scope = scopes[it.scope]);
        let mut text = print_graph(&graph);
        for (scope, axes) in
            declared.iter().enumerate().filter_map(|(i, it)| Some((i, it.as_ref()?)))
        {
            text += &format!("weight_mesh of scope {scope}: {axes}\n");
        }
        Digest::of(&text)
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

    /// Fields that change what is computed, with another value.
    const CHANGES: &[(&str, &str)] = &[
        ("name", "\"other\""),
        ("batch", "Global(16)"),
        ("sequence", "64"),
        ("micro_batches", "2"),
        ("weight_mesh", "[\"dp\"]"),
        ("recipe", "DelayedScaling()"),
        ("init", "Normal(std: 0.03)"),
        ("output_init", "Zeros"),
        ("names", "Gpt2"),
        ("optimizer", "Sgd()"),
        ("optimizer.betas", "(0.8, 0.95)"),
        ("optimizer.eps", "1e-7"),
        ("optimizer.weight_decay", "0.2"),
        ("schedule", "(lr: 2e-3)"),
        ("schedule.lr", "2e-3"),
        ("schedule.warmup", "3"),
        ("schedule.decay", "Linear(until: 10, min: 0)"),
        ("clip_norm", "2.0"),
        ("reduce_gradients", "LastMicroBatch"),
        ("decay", "[\"*norm.weight\"]"),
        ("no_decay", "[\"lm_head.weight\"]"),
        ("frozen", "[\"*norm.weight\"]"),
        ("tied", "[(\"lm_head.weight\", \"model.embed_tokens.weight\")]"),
        ("parameters", "{\"lm_head.weight\": (init: Zeros)}"),
        ("steps", "30"),
        ("seed", "7"),
        ("precision", "(storage: bf16)"),
        ("precision.storage", "bf16"),
        ("precision.compute", "bf16"),
        ("precision.reduce", "bf16"),
        ("precision.output", "bf16"),
        (
            "layers",
            "[Embedding(name: \"e\", vocab: 8, dim: 8), Linear(name: \"l\", out_features: 8), CrossEntropy()]",
        ),
    ];

    /// Fields that change no number that an exact machine would compute, with another value and the reason.
    const KEEPS: &[(&str, &str, &str)] = &[
        (
            "meshes",
            "{1: [\"dp\"], 2: [\"dp\", \"tp\"], 3: [\"a\", \"dp\", \"tp\"]}",
            "they name axes",
        ),
        ("data_parallel", "[\"dp\"]", "it places data"),
        ("fsdp", "(dim: 1)", "it places weights"),
        ("fsdp.axes", "[]", "they place weights"),
        ("fsdp.dim", "1", "it places weights"),
        ("fsdp.units", "Model", "they say when weights are gathered"),
        ("fsdp.reshard_after_forward", "false", "it says when weights are gathered"),
        ("fsdp.reshard_root", "true", "it says when weights are gathered"),
        ("tp_mesh", "\"tp\"", "it places weights and activations"),
        ("replicas", "[]", "it allows a mesh"),
        ("sequence_parallel", "false", "it places activations"),
        ("checkpoint", "Full", "what is computed again is the same"),
        ("precision.cast_inputs", "false", "it allows a model"),
    ];

    /// Each field of the model, and of the structs in it, is in one of the lists, which say what it does.
    #[test]
    fn each_field_changes_the_digest_or_has_a_reason_not_to() {
        let base = [("recipe", "Float8CurrentScaling()")];
        let of = |set: (&str, &str)| digest(MODEL, "2x2", &[base[0], set]);
        let expect = digest(MODEL, "2x2", &base);
        for &it in CHANGES {
            assert_ne!(of(it), expect, "{it:?}");
        }
        for &(field, value, why) in KEEPS {
            assert_eq!(of((field, value)), expect, "`{field}`: {why}");
        }
        let listed: Vec<&str> =
            CHANGES.iter().map(|it| it.0).chain(KEEPS.iter().map(|it| it.0)).collect();
        for owner in ["", "fsdp.", "precision.", "schedule.", "optimizer."] {
            let unknown = match owner {
                "" => MODEL.replacen("Model(", "Model(zz: 1, ", 1),
                "optimizer." => MODEL.replacen("AdamW(", "AdamW(zz: 1, ", 1),
                "schedule." => MODEL.replacen("schedule: (", "schedule: (zz: 1, ", 1),
                "fsdp." => MODEL.replacen("Model(", "Model(fsdp: (zz: 1), ", 1),
                _ => MODEL.replacen("Model(", "Model(precision: (zz: 1), ", 1),
            };
            let problem = *parse_with(&unknown, &[]).expect_err("an unknown field").problem;
            let crate::model::Problem::UnknownField { known, .. } = problem else {
                panic!("{problem:?}")
            };
            for field in known {
                let path = format!("{owner}{field}");
                assert!(listed.contains(&path.as_str()), "`{path}` is in no list");
            }
        }
    }

    /// The `weight_mesh` of a module decides over which axes its scales agree.
    #[test]
    fn the_weight_mesh_of_a_module_changes_the_digest() {
        let base = ("recipe", "Float8CurrentScaling()");
        let of = |axes: &str| digest(MODEL, "2x2", &[base, ("layers[1].weight_mesh", axes)]);
        assert_ne!(of("[\"dp\"]"), digest(MODEL, "2x2", &[base]));
        assert_ne!(of("[\"dp\"]"), of("[\"dp\", \"tp\"]"));
        assert_eq!(of("[\"dp\", \"tp\"]"), of("[\"tp\", \"dp\"]"));
    }

    #[test]
    fn a_digest_is_read_as_it_is_printed() {
        let digest = Digest::of("planc");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        assert_eq!("0g".repeat(32).parse::<Digest>(), Err(DigestError));
        assert_eq!("ab".parse::<Digest>(), Err(DigestError));
    }
}
