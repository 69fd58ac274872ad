//! `model.ron`: a model, its placement and its training, as the user writes them.
//!
//! [`parse`] reads the text into [`schema::Model`]; [`elaborate`] turns that and a mesh into a
//! [`Graph`](crate::Graph) of phase `Logical`: global shapes, with weights, batch and residual
//! stream pinned. Every mistake of the user is a [`ModelError`] that can point into the text.

mod attributes;
mod elaborate;
mod error;
mod jobs;
mod layout;
mod locate;
mod mesh;
pub mod modules;
mod names;
mod params;
mod pattern;
mod range;
pub mod schema;

use ron::extensions::Extensions;

pub use elaborate::{Cx, Values, elaborate};
pub(crate) use error::bytes_of;
pub use error::{At, ModelError, Problem};
pub use layout::{Axes, Layout, Tp};
pub use locate::locate;
pub use mesh::{MeshSpec, axes_text};
pub use names::Names;
pub use params::{ParamSpec, Start};
pub use pattern::{NamePattern, PatternError};
pub use range::{Fields, MAX_SIZE};
pub(crate) use range::{check_run, check_training};
pub use schema::Model;

/// Reads the text of a `model.ron`.
pub fn parse(source: &str) -> Result<Model, ModelError> {
    let extensions = Extensions::IMPLICIT_SOME | Extensions::UNWRAP_VARIANT_NEWTYPES;
    let options = ron::Options::default().with_default_extension(extensions);
    // A byte order mark is no part of the text.
    let text = source.strip_prefix('\u{feff}').unwrap_or(source);
    let model = options
        .from_str(text)
        .map_err(|it| error::from_ron(text, it).shifted(source.len() - text.len()))?;
    match locate::repeated_key(source) {
        Some(places) => Err(error::repeated_key(source, places)),
        None => Ok(model),
    }
}

/// Reads the text of a `model.ron` with some values replaced, as `--set path=value` asks:
/// `("precision.compute", "bf16")`. A value is RON; a path that the text leaves out is added.
pub fn parse_with(source: &str, overrides: &[(&str, &str)]) -> Result<Model, ModelError> {
    parse(source)?;
    let mut text = source.to_string();
    for &(path, value) in overrides {
        let fail = |why: String, help: Option<String>| {
            let (path, value) = (path.to_string(), value.to_string());
            Problem::Override { path: path.clone(), value, why, help }.at(At::Override(path))
        };
        let replaced =
            locate::splice(&text, path, value).map_err(|it| fail(it, meant(&text, path, value)))?;
        if let Err(it) = parse(&replaced) {
            let help = it.help().map_or(String::new(), |it| format!("; {it}"));
            return Err(fail(format!("{it}{help}"), meant(&text, path, value)));
        }
        text = replaced;
    }
    parse(&text)
}

/// Overrides near to `path=value` that `source` takes: the value with brackets or quotes, in a variant, or
/// of a field of what is at `path`.
fn meant(source: &str, path: &str, value: &str) -> Option<String> {
    let with = |path: &str, value: &str| locate::splice(source, path, value).map(|it| parse(&it));
    let fits = |(path, value): &(String, String)| matches!(with(path, value), Ok(Ok(_)));
    // An unknown name makes the parser list the known ones.
    let known = |value: &str| match with(path, value).ok()?.err().map(|it| *it.problem) {
        Some(Problem::UnknownField { known, .. } | Problem::UnknownVariant { known, .. }) => {
            Some(known)
        }
        _ => None,
    };
    let here = |value: String| (path.to_string(), value);
    let whole = [format!("{value}()"), format!("\"{value}\"")].map(here);
    let variants = known("_").unwrap_or_default();
    let variants = variants.iter().map(|it| here(format!("{it}({value})")));
    let fields = known("(_: 0)").unwrap_or_default();
    let fields = fields.iter().map(|it| (format!("{path}.{it}"), value.to_string()));
    let all = whole.into_iter().chain(variants).chain(fields).filter(fits);
    let all: Vec<String> = all.map(|(path, value)| format!("`--set '{path}={value}'`")).collect();
    match all.as_slice() {
        [] => None,
        [one] => Some(format!("did you mean {one}?")),
        [rest @ .., last] => Some(format!("did you mean {} or {last}?", rest.join(", "))),
    }
}

#[cfg(test)]
mod tests;
