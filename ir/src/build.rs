//! `Builder`: appends nodes to a graph, infers their types and keeps names unique.
//!
//! Used by `elaborate` and by the passes that emit ops (`autodiff`, `update`). Errors are the user's:
//! operands that do not fit, with the name of the value that could not be made.

use std::hash::BuildHasher;

use rustc_hash::{FxBuildHasher, FxHashMap};
use smallvec::SmallVec;

use crate::graph::{Def, Graph, Name, NewNode, Scope, Section, Value};
use crate::ops::{Op, TypeError, Types};
use crate::placement::Sharding;
use crate::types::TensorType;

/// A value that could not be made.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("`{name}` ({op}): {source}")]
pub struct BuildError {
    /// The value.
    pub name: Name,
    /// The op, in text IR.
    pub op: String,
    /// Why.
    pub source: TypeError,
}

/// See the [module docs](self).
pub struct Builder<'a> {
    /// The graph under construction.
    pub graph: &'a mut Graph,
    /// Section of the nodes to come.
    pub section: Section,
    /// Module of the nodes to come.
    pub scope: Scope,
    /// How often each name was wanted, by its hash: two names of one hash only cost a suffix.
    names: FxHashMap<u64, u32>,
}

impl<'a> Builder<'a> {
    /// A builder that appends to `graph`, in section `Forward` and the model's own scope.
    pub fn new(graph: &'a mut Graph) -> Builder<'a> {
        let names = graph.values.values().map(|it| (hash(&it.name), 1)).collect();
        let scope = graph.scopes.keys().next().expect("a graph has a root scope");
        Builder { graph, section: Section::Forward, scope, names }
    }

    /// `name`, or `name.2`, `name.3`, ... where it is taken.
    pub fn unique(&mut self, name: &str) -> Name {
        let mut res = name.to_string();
        let mut n = self.names.get(&hash(name)).copied().unwrap_or(0);
        while self.names.contains_key(&hash(&res)) {
            n += 1;
            res = format!("{name}.{n}");
        }
        self.names.insert(hash(name), n.max(1));
        self.names.insert(hash(&res), 1);
        res
    }

    /// A value without a producer.
    pub fn leaf(&mut self, name: &str, ty: TensorType, def: Def) -> Value {
        let name = self.unique(name);
        self.graph.add_leaf(name, ty, def)
    }

    /// Applies a one-result op.
    pub fn op(
        &mut self,
        name: &str,
        op: impl Into<Op>,
        inputs: &[Value],
    ) -> Result<Value, BuildError> {
        Ok(self.ops(&[name], op, inputs)?[0])
    }

    /// Applies an op with one name per result.
    pub fn ops(
        &mut self,
        names: &[&str],
        op: impl Into<Op>,
        inputs: &[Value],
    ) -> Result<SmallVec<[Value; 2]>, BuildError> {
        let op = op.into();
        let types = {
            let types: SmallVec<[&TensorType; 4]> =
                inputs.iter().map(|&it| self.graph.ty(it)).collect();
            op.infer(&types).and_then(within_limits).map_err(|source| BuildError {
                name: names[0].to_string(),
                op: op.to_text(),
                source,
            })?
        };
        assert_eq!(types.len(), names.len(), "`{}` has {} results", op.to_text(), types.len());
        let results: SmallVec<[(Name, TensorType); 2]> =
            names.iter().zip(types).map(|(name, ty)| (self.unique(name), ty)).collect();
        let (section, scope) = (self.section, self.scope);
        let data = NewNode { op, inputs, results: &results, section, scope };
        let node = self.graph.add_node(data);
        self.graph.order.push(node);
        Ok(self.graph.nodes[node].results.clone())
    }

    /// Fixes where `value` lives.
    pub fn pin(&mut self, value: Value, sharding: Sharding) {
        let data = &mut self.graph.values[value];
        data.sharding = Some(sharding);
        data.pinned = true;
    }
}

fn hash(name: &str) -> u64 {
    FxBuildHasher.hash_one(name)
}

fn within_limits(types: Types) -> Result<Types, TypeError> {
    match types.iter().find_map(|it| Some((it, it.exceeds()?))) {
        Some((found, limit)) => Err(TypeError::TooLarge { found: found.clone(), limit }),
        None => Ok(types),
    }
}
