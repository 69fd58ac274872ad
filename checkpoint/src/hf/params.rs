//! The parameters of a model, as imports and exports see them.

use ir::Graph;
use ir::graph::Scope;
use ir::ops::Op;
use rustc_hash::FxHashMap;

use crate::dtype::StoredType;

/// A parameter of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// Other names of the same tensor.
    pub aliases: Vec<String>,
    /// Global sizes.
    pub shape: Vec<u64>,
    /// Type of the master weight.
    pub dtype: StoredType,
    /// Features of a head, where its module is in an attention.
    pub head_dim: Option<u64>,
}

/// The parameters of a graph as a model gives it, on any mesh.
pub fn params(graph: &Graph) -> Vec<Param> {
    let mut head_dims: FxHashMap<Scope, u64> = FxHashMap::default();
    for node in graph.nodes.values() {
        if let Op::Attention(it) = &node.op {
            head_dims.insert(node.scope, it.head_dim);
        }
    }
    let head_dim = |scope: Scope| {
        let around = std::iter::successors(Some(scope), |&it| graph.scopes[it].parent);
        around.into_iter().find_map(|it| head_dims.get(&it).copied())
    };
    let param = |it: &ir::graph::Param| {
        let ty = graph.ty(it.value);
        Param {
            name: graph.values[it.value].name.clone(),
            aliases: it.aliases.clone(),
            shape: ty.shape.to_vec(),
            dtype: ty.dtype.into(),
            head_dim: head_dim(it.scope),
        }
    };
    graph.params.iter().map(param).collect()
}
