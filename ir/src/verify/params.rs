//! Checks the inits and aliases of parameters, of a graph or a plan.
//!
//! An alias is a name under which weights are read and saved besides the parameter's own. It belongs to one parameter,
//! and is not the name of another: a checkpoint would hold one tensor under the name of the other.

use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::graph::{Init, Name};

/// A parameter of a graph or a plan.
pub(super) struct Declared<'a> {
    pub name: &'a str,
    pub init: &'a Init,
    pub aliases: &'a [Name],
}

/// Faults of parameters, each with the index of the parameter.
pub(super) fn faults(params: &[Declared<'_>]) -> Vec<(usize, String)> {
    let mut res = Vec::new();
    // For each name, the parameter that has it, and whether it is the parameter's own name.
    let mut owners: FxHashMap<&str, (usize, bool)> =
        FxHashMap::with_capacity_and_hasher(params.len(), FxBuildHasher);
    params.iter().enumerate().for_each(|(i, it)| {
        owners.insert(it.name, (i, true));
    });
    for (i, param) in params.iter().enumerate() {
        let fault = param.init.numbers().iter().find_map(|it| it.check().err());
        res.extend(fault.map(|it| (i, format!("init: {it}"))));
        for alias in param.aliases {
            let message = match owners.insert(alias, (i, false)) {
                None => continue,
                Some((owner, own)) => {
                    // The first to have a name keeps it.
                    owners.insert(alias, (owner, own));
                    match (owner == i, own) {
                        (true, true) => format!("has its own name `{alias}` as an alias"),
                        (true, false) => format!("has the alias `{alias}` twice"),
                        (false, true) => format!(
                            "has the alias `{alias}`, which is another parameter: checkpoints would hold \
                             this one under that name"
                        ),
                        (false, false) => format!(
                            "has the alias `{alias}`, which is an alias of %{} already",
                            params[owner].name
                        ),
                    }
                }
            };
            res.push((i, message));
        }
    }
    res
}
