//! `MeshSpec`: the mesh as the command line gives it, and how the model names its axes.

use std::collections::BTreeMap;
use std::fmt;

use super::error::{At, ModelError, Problem};
use crate::placement::{Mesh, MeshAxis};

/// A mesh as in `--mesh 8`, `--mesh 2x4` or `--mesh dp=2,tp=4`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MeshSpec {
    /// Sizes, named by the model according to how many there are.
    Sizes(Vec<u32>),
    /// Sizes with names.
    Named(Vec<(String, u32)>),
}

impl MeshSpec {
    /// Reads `8`, `2x4` or `dp=2,tp=4`.
    pub fn parse(text: &str) -> Result<MeshSpec, ModelError> {
        let bad = |why: &str| {
            Problem::BadMesh { text: text.to_string(), why: why.to_string() }.at(At::Mesh)
        };
        let size = |axis: Option<String>, size: &str| match size.trim().parse::<u32>() {
            Ok(0) => Err(Problem::EmptyAxis { axis }.at(At::Mesh)),
            Ok(size) => Ok(size),
            Err(_) => Err(bad(&format!("`{}` is no size", size.trim()))),
        };
        if text.trim().is_empty() {
            return Err(bad("it is empty"));
        }
        if !text.contains('=') {
            let several = text.contains(['x', 'X']);
            let place =
                |i: usize| several.then(|| format!("number {} of `{}`", i + 1, text.trim()));
            let sizes = text.split(['x', 'X']).enumerate();
            let sizes = sizes.map(|(i, it)| size(place(i), it));
            return Ok(MeshSpec::Sizes(sizes.collect::<Result<_, _>>()?));
        }
        let mut res: Vec<(String, u32)> = Vec::new();
        for part in text.split(',') {
            let (name, value) =
                part.split_once('=').ok_or_else(|| bad(&format!("`{part}` is no `axis=size`")))?;
            let name = name.trim();
            if res.iter().any(|it| it.0 == name) {
                return Err(bad(&format!("`{name}` is given twice")));
            }
            res.push((name.to_string(), size(Some(format!("`{name}`")), value)?));
        }
        Ok(MeshSpec::Named(res))
    }

    /// The mesh, with the names that the model has for it.
    pub(super) fn resolve(&self, names: &BTreeMap<usize, Vec<String>>) -> Result<Mesh, ModelError> {
        let axes: Vec<MeshAxis> = match self {
            MeshSpec::Sizes(sizes) => {
                let names = names.get(&sizes.len()).ok_or_else(|| {
                    let known = names.clone();
                    Problem::AxisCount { found: sizes.len(), known }.at(At::Mesh)
                })?;
                names.iter().zip(sizes).map(|(name, &size)| axis(name, size)).collect()
            }
            MeshSpec::Named(axes) => {
                let known = all_names(names);
                if let Some((name, _)) = axes.iter().find(|it| !known.contains(&it.0)) {
                    return Err(Problem::UnknownAxis { name: name.clone(), known }.at(At::Mesh));
                }
                axes.iter().map(|(name, size)| axis(name, *size)).collect()
            }
        };
        let mesh = Mesh { axes };
        mesh.validate().map_err(|it| {
            Problem::BadMesh { text: self.to_string(), why: it.to_string() }.at(At::Mesh)
        })?;
        Ok(mesh)
    }
}

/// Every axis that some mesh of the model has.
pub(super) fn all_names(names: &BTreeMap<usize, Vec<String>>) -> Vec<String> {
    let mut res: Vec<String> = Vec::new();
    for name in names.values().flatten() {
        if !res.contains(name) {
            res.push(name.clone());
        }
    }
    res
}

fn axis(name: &str, size: u32) -> MeshAxis {
    MeshAxis { name: name.to_string(), size, part_of: None }
}

impl fmt::Display for MeshSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&match self {
            MeshSpec::Sizes(sizes) => {
                sizes.iter().map(u32::to_string).collect::<Vec<String>>().join("x")
            }
            MeshSpec::Named(axes) => axes_text(axes.iter().map(|it| (&it.0, it.1)), ","),
        })
    }
}

/// Axes with a size or an index each: `dp=2,tp=4`, with this between two of them.
pub fn axes_text<N: fmt::Display>(
    axes: impl IntoIterator<Item = (N, u32)>,
    between: &str,
) -> String {
    let text = axes.into_iter().map(|(name, size)| format!("{name}={size}"));
    text.collect::<Vec<String>>().join(between)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expect: Result<&[(&str, u32)], &str>) {
        let names = |it: &[&str]| it.iter().map(|it| it.to_string()).collect::<Vec<String>>();
        let meshes = BTreeMap::from([(1, names(&["dp"])), (2, names(&["dp", "tp"]))]);
        let found = MeshSpec::parse(text).and_then(|it| it.resolve(&meshes));
        let found = found.map_err(|it| it.to_string());
        assert_eq!(found, expect.map(Mesh::new).map_err(str::to_string));
    }

    #[test]
    fn reads_meshes() {
        check("8", Ok(&[("dp", 8)]));
        check("2x4", Ok(&[("dp", 2), ("tp", 4)]));
        check("dp=2,tp=4", Ok(&[("dp", 2), ("tp", 4)]));
        check("tp=4", Ok(&[("tp", 4)]));
    }

    #[test]
    fn refuses_what_is_none() {
        let least = "an axis needs at least one rank";
        check("0", Err(&format!("the mesh has an axis of size 0; {least}")));
        check("2x0", Err(&format!("the mesh has an axis of size 0, number 2 of `2x0`; {least}")));
        check("tp=0", Err(&format!("the mesh has an axis of size 0, `tp`; {least}")));
        check("2xtp", Err("`2xtp` is no mesh: `tp` is no size"));
        check("dp=2,dp=2", Err("`dp=2,dp=2` is no mesh: `dp` is given twice"));
        check("", Err("`` is no mesh: it is empty"));
        check("pt=2", Err("no mesh of this model has an axis `pt`"));
        check(
            "2x2x2x2",
            Err(
                "the mesh has 4 axes, and the model names the axes of meshes of 1 (dp), 2 (dp, tp)",
            ),
        );
    }
}
