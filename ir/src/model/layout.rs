//! `Layout`: what each axis of the mesh is for, with the tensor-parallel axis refined where KV heads
//! are fewer than its coordinates, and an axis of FSDP where weights are resharded to a part of it.
//!
//! ```text
//! (dp=2, tp=4), 2 KV heads  ->  (dp=2, tp_kv=2, tp_rep=2)
//! query heads               ->  [tp_kv.tp_rep]
//! KV heads                  ->  [tp_kv], replicated over tp_rep
//!
//! (dp=8), reshard_after_forward: 4  ->  (dp_out=2, dp_in=4), weights [dp_out.dp_in], kept as [dp_in]
//! ```

use smallvec::SmallVec;

use super::error::{At, ModelError, Problem};
use super::mesh::{MeshSpec, all_names};
use super::modules::Attention;
use super::schema::{Model, ReshardAfterForward};
use crate::graph::AfterForward;
use crate::placement::{Axis, AxisSet, DimLayout, Mesh};

/// Axes of one job, major to minor.
pub type Axes = SmallVec<[Axis; 4]>;

/// The axes of one job by what they are for, read from the model and the mesh.
#[derive(Debug)]
pub struct Layout {
    /// The refined mesh.
    pub mesh: Mesh,
    /// Names of the axes of all meshes of the model.
    pub names: Vec<String>,
    /// Axes that shard the batch, without those of size 1.
    pub data: Axes,
    /// Axes that shard parameters, those of size 1 among them.
    pub fsdp: Axes,
    /// Names of the axes that shard parameters, on any mesh.
    pub fsdp_names: Vec<String>,
    /// What becomes of gathered weights of layers.
    pub after_forward: AfterForward,
    /// The model's tensor-parallel axis.
    pub tp: Tp,
    /// Names of the axes along which ranks may do the same work.
    pub replicas: Vec<String>,
    /// Axes over which a weight's scale must agree, if declared.
    pub weight_mesh: Option<AxisSet>,
}

/// A tensor-parallel axis.
#[derive(Debug, Clone, Default)]
pub struct Tp {
    /// The user's name of it; empty if the model has none.
    pub name: String,
    /// The parts of the axis, major to minor, also if it is of size 1.
    pub axes: Axes,
    /// How many coordinates it has.
    pub size: u64,
}

impl Layout {
    pub(super) fn new(model: &Model, spec: &MeshSpec) -> Result<Layout, ModelError> {
        for (n, axes) in &model.meshes {
            if axes.len() != *n {
                let field = format!("number of axes of mesh {n}");
                let (found, expected) = (axes.len().to_string(), n.to_string());
                let problem = Problem::Range { field, found, expected };
                return Err(problem.at(At::Path(format!("meshes[{n}]"))));
            }
        }
        let names = all_names(&model.meshes);
        let mut mesh = spec.resolve(&model.meshes)?;
        let tp_name = match &model.tp_mesh {
            Some(name) => checked(name, &names, "tp_mesh")?,
            None => names.iter().find(|it| *it == "tp").cloned().unwrap_or_default(),
        };
        let data_names = job(
            &model.data_parallel,
            &["dp", "dp_replicate", "dp_shard"],
            &names,
            "data_parallel",
        )?;
        if data_names.contains(&tp_name) {
            let (first, second) = ("data-parallel", "tensor-parallel");
            let problem = Problem::AxisTwice { axis: tp_name, first, second };
            let field = if model.tp_mesh.is_some() { "tp_mesh" } else { "data_parallel" };
            return Err(problem.at(At::Path(field.into())));
        }
        let fsdp_names = job(&model.fsdp.axes, &["dp", "dp_shard"], &names, "fsdp.axes")?;
        if fsdp_names.contains(&tp_name) {
            let (first, second) = ("an axis of FSDP", "tensor-parallel");
            let problem = Problem::AxisTwice { axis: tp_name, first, second };
            let field = if model.fsdp.axes.is_some() { "fsdp.axes" } else { "tp_mesh" };
            return Err(problem.at(At::Path(field.into())));
        }
        let mut attentions = Vec::new();
        super::modules::attentions(&model.layers, "layers", &mut attentions);
        mesh = refine(mesh, &attentions, &tp_name, &names)?;
        let (mesh, after_forward) =
            after_forward(mesh, model.fsdp.reshard_after_forward, &fsdp_names)?;
        let data = axes(&mesh, &data_names).into_iter().filter(|&it| mesh.size(it) > 1).collect();
        let fsdp = axes(&mesh, &fsdp_names);
        let tp = Tp::new(&mesh, &tp_name);
        let weight_mesh = match &model.weight_mesh {
            Some(it) => Some(set(&mesh, &job(&Some(it.clone()), &[], &names, "weight_mesh")?)),
            None => None,
        };
        let replicas = job(&Some(model.replicas.clone()), &[], &names, "replicas")?;
        Ok(Layout { mesh, names, data, fsdp, fsdp_names, after_forward, tp, replicas, weight_mesh })
    }

    /// The tensor-parallel axis called `name`.
    pub(super) fn tp_named(&self, name: &str, path: &str) -> Result<Tp, ModelError> {
        let name = checked(name, &self.names, path)?;
        let axes = axes(&self.mesh, std::slice::from_ref(&name));
        let taken = [("data-parallel", &self.data), ("an axis of FSDP", &self.fsdp)];
        let taken = taken.iter().find(|it| axes.iter().any(|axis| it.1.contains(axis)));
        if let Some(&(first, _)) = taken {
            let second = "tensor-parallel";
            return Err(Problem::AxisTwice { axis: name, first, second }.at(At::Path(path.into())));
        }
        Ok(Tp::new(&self.mesh, &name))
    }

    /// The axes called `names`, as a set.
    pub(super) fn axis_set(&self, names: &[String], path: &str) -> Result<AxisSet, ModelError> {
        names.iter().try_for_each(|it| checked(it, &self.names, path).map(drop))?;
        once(names, path)?;
        Ok(set(&self.mesh, names))
    }

    /// Coordinates over the data-parallel axes.
    pub(super) fn data_size(&self) -> u64 {
        self.data.iter().map(|&it| u64::from(self.mesh.size(it))).product()
    }

    /// The data-parallel axes with sizes, for messages.
    pub(super) fn data_text(&self) -> String {
        let text = |&it: &Axis| format!("{} = {}", self.mesh.name(it), self.mesh.size(it));
        let axes: Vec<String> = self.data.iter().map(text).collect();
        if axes.is_empty() { "none".to_string() } else { axes.join(", ") }
    }
}

impl Tp {
    fn new(mesh: &Mesh, name: &str) -> Tp {
        let axes = axes(mesh, &[name.to_string()]);
        let size = axes.iter().map(|&it| u64::from(mesh.size(it))).product();
        Tp { name: name.to_string(), axes, size }
    }

    /// A dimension cut over the whole axis.
    pub fn cut(&self) -> DimLayout {
        DimLayout::over(self.axes.iter().copied())
    }

    /// A dimension of `heads` heads cut over as much of the axis as there are heads.
    pub fn cut_heads(&self, heads: u64, mesh: &Mesh) -> DimLayout {
        let mut size = 1;
        let whole = |it: &&Axis| {
            size *= u64::from(mesh.size(**it));
            size <= heads
        };
        DimLayout::over(self.axes.iter().take_while(whole).copied())
    }
}

/// Splits tensor-parallel axes where KV heads are replicated over a part of them.
fn refine(
    mut mesh: Mesh,
    attentions: &[Attention],
    model_tp: &str,
    names: &[String],
) -> Result<Mesh, ModelError> {
    // (axis, KV heads), each once, fewest heads first.
    let mut cuts: Vec<(String, u64)> = Vec::new();
    for it in attentions {
        let name = match &it.tp_mesh {
            Some(name) => checked(name, names, &format!("{}.tp_mesh", it.path))?,
            None => model_tp.to_string(),
        };
        let size = mesh.axis(&name).map_or(1, |axis| u64::from(mesh.size(axis)));
        let at = |field: &str| At::Path(format!("{}.{field}", it.path));
        if it.heads == 0 || it.kv_heads == 0 || it.heads % it.kv_heads != 0 {
            let expected = format!("a divisor of heads, which is {}", it.heads);
            let found = it.kv_heads.to_string();
            return Err(
                Problem::Range { field: "kv_heads".into(), found, expected }.at(at("kv_heads"))
            );
        }
        if it.heads % size != 0 {
            let problem = Problem::Indivisible {
                tensor: it.name.clone(),
                what: "the number of query heads".to_string(),
                size: it.heads,
                axis: name.clone(),
                axis_size: size,
                fix: format!("use a `{name}` that divides the {} heads", it.heads),
            };
            return Err(problem.at(at("heads")));
        }
        if !it.kv_heads.is_multiple_of(size) && !size.is_multiple_of(it.kv_heads) {
            let (module, kv_heads) = (it.name.clone(), it.kv_heads);
            let problem = Problem::KvHeads { module, kv_heads, axis: name, axis_size: size };
            return Err(problem.at(at("kv_heads")));
        }
        if 1 < it.kv_heads && it.kv_heads < size && !cuts.contains(&(name.clone(), it.kv_heads)) {
            cuts.push((name, it.kv_heads));
        }
    }
    cuts.sort();
    let mut done: Option<(String, u64, String)> = None;
    for (n, (name, kv_heads)) in cuts.into_iter().enumerate() {
        let (parent, major, before) = match &done {
            Some((axis, before, rest)) if *axis == name => {
                if kv_heads % before != 0 {
                    let found = kv_heads.to_string();
                    let expected = format!(
                        "a multiple of {before}, the KV heads of another attention that are \
                         replicated over `{name}` too"
                    );
                    let problem = Problem::Range { field: "kv_heads".into(), found, expected };
                    return Err(problem.at(At::Path("layers".into())));
                }
                (rest.clone(), kv_heads / before, true)
            }
            _ => (name.clone(), kv_heads, false),
        };
        let suffix = if before { format!("{}", n + 1) } else { String::new() };
        let minor = format!("{name}_rep{suffix}");
        mesh = mesh.refine(&parent, major as u32, &format!("{name}_kv{suffix}"), &minor).map_err(
            |it| Problem::BadMesh { text: name.clone(), why: it.to_string() }.at(At::Mesh),
        )?;
        done = Some((name, kv_heads, minor));
    }
    Ok(mesh)
}

/// What becomes of gathered weights of layers. The group of ranks that keep them is made of the minor axes
/// of FSDP, of which one is split where the group ends inside it.
fn after_forward(
    mut mesh: Mesh,
    wanted: ReshardAfterForward,
    fsdp: &[String],
) -> Result<(Mesh, AfterForward), ModelError> {
    let group = match wanted {
        ReshardAfterForward::Flag(false) | ReshardAfterForward::Group(1) => {
            return Ok((mesh, AfterForward::Keep));
        }
        ReshardAfterForward::Flag(true) => return Ok((mesh, AfterForward::Drop)),
        ReshardAfterForward::Group(group) => group,
    };
    let all: u64 = axes(&mesh, fsdp).iter().map(|&it| u64::from(mesh.size(it))).product();
    if group >= all {
        return Ok((mesh, AfterForward::Drop));
    }
    let invalid = || {
        let names = fsdp.iter().map(|it| format!("`{it}`")).collect::<Vec<_>>().join(", ");
        Problem::Range {
            field: "fsdp.reshard_after_forward".into(),
            found: group.to_string(),
            expected: format!("a divisor of the {all} coordinates of {names}, minor axes first"),
        }
        .at(At::Path("fsdp.reshard_after_forward".into()))
    };
    let (mut rest, mut kept) = (group, Vec::new());
    for axis in axes(&mesh, fsdp).into_iter().rev() {
        let (size, name) = (u64::from(mesh.size(axis)), mesh.name(axis).to_string());
        if rest == 1 {
            break;
        }
        if size == 1 {
            continue;
        }
        if rest.is_multiple_of(size) {
            rest /= size;
            kept.push(name);
        } else if size.is_multiple_of(rest) {
            let minor = format!("{name}_in");
            mesh =
                mesh.refine(&name, (size / rest) as u32, &format!("{name}_out"), &minor).map_err(
                    |it| Problem::BadMesh { text: name.clone(), why: it.to_string() }.at(At::Mesh),
                )?;
            rest = 1;
            kept.push(minor);
        } else {
            break;
        }
    }
    if rest != 1 {
        return Err(invalid());
    }
    let kept = kept.iter().filter_map(|it| mesh.axis(it)).collect();
    Ok((mesh, AfterForward::KeepPiece(kept)))
}

/// `name`, if a mesh of the model has it.
fn checked(name: &str, names: &[String], path: &str) -> Result<String, ModelError> {
    if names.iter().any(|it| it == name) {
        return Ok(name.to_string());
    }
    let problem = Problem::UnknownAxis { name: name.to_string(), known: names.to_vec() };
    Err(problem.at(At::Path(path.to_string())))
}

/// Names of axes for a job: those given, or the usual ones that the model has.
fn job(
    given: &Option<Vec<String>>,
    usual: &[&str],
    names: &[String],
    field: &str,
) -> Result<Vec<String>, ModelError> {
    match given {
        Some(given) => {
            once(given, field)?;
            let checked = given
                .iter()
                .enumerate()
                .map(|(i, it)| checked(it, names, &format!("{field}[{i}]")));
            checked.collect()
        }
        None => Ok(names.iter().filter(|it| usual.contains(&it.as_str())).cloned().collect()),
    }
}

/// Refuses an axis that a list has twice.
fn once(names: &[String], field: &str) -> Result<(), ModelError> {
    match (0..names.len()).find(|&i| names[..i].contains(&names[i])) {
        None => Ok(()),
        Some(i) => {
            let why = format!("`{}` is in the list twice", names[i]);
            let at = At::Path(format!("{field}[{i}]"));
            Err(Problem::NoEffect { field: format!("{field}[{i}]"), why }.at(at))
        }
    }
}

/// The axes of these names that the mesh has, in the order of the mesh.
fn axes(mesh: &Mesh, names: &[String]) -> Axes {
    set(mesh, names).iter().collect()
}

fn set(mesh: &Mesh, names: &[String]) -> AxisSet {
    names.iter().flat_map(|it| mesh.axes_named(it)).collect()
}
