//! Weights: made from a seed, or read from `.safetensors` files.
//!
//! An initial value depends on the seed, the parameter's name and the element's global index, and on
//! nothing else, so that a model starts with the same bits on every mesh:
//!
//! ```text
//! philox(counter: [index / 4 (2 words), stream_key(name) (2 words)], key: seed)  ->  4 words, one each
//! ```

use std::collections::BTreeMap;
use std::f64::consts::TAU;
use std::path::PathBuf;
use std::sync::Arc;

use half::{bf16, f16};
use ir::graph::Init;
use ir::plan::{Buffer, Plan};
use ir::random::{philox4x32_10, stream_key};
use safetensors::{Dtype, SafeTensors};

use crate::error::RunError;
use crate::map::Mapped;

/// Initial values of the elements `start ..` of a parameter.
pub fn init_values(init: Init, seed: u64, name: &str, start: u64, out: &mut [f32]) {
    match init {
        Init::Zeros => out.fill(0.0),
        Init::Ones => out.fill(1.0),
        Init::Normal { mean, std } => {
            from_blocks(seed, name, start, out, |words, lane| {
                (mean + std * normal(words, lane)) as f32
            });
        }
        Init::Uniform { low, high } => {
            from_blocks(seed, name, start, out, |words, lane| uniform(low, high, words[lane]));
        }
    }
}

/// Halves of a word pair, low first.
pub(crate) fn halves(it: u64) -> [u32; 2] {
    [it as u32, (it >> 32) as u32]
}

/// Sets each element from the four words of its block and its place in it.
fn from_blocks(
    seed: u64,
    name: &str,
    start: u64,
    out: &mut [f32],
    value: impl Fn([u32; 4], usize) -> f32,
) {
    let [name_low, name_high] = halves(stream_key(name));
    let mut current = None;
    for (i, out) in (start..).zip(out) {
        let (block, lane) = (i / 4, (i % 4) as usize);
        let words = match current {
            Some((it, words)) if it == block => words,
            _ => {
                let [low, high] = halves(block);
                philox4x32_10([low, high, name_low, name_high], halves(seed))
            }
        };
        current = Some((block, words));
        *out = value(words, lane);
    }
}

/// On `[0, 1)`.
fn unit(word: u32) -> f64 {
    f64::from(word) / 2f64.powi(32)
}

/// On `[low, high)`: rounding may reach the bound, which is not a value.
fn uniform(low: f64, high: f64, word: u32) -> f32 {
    let value = (low + (high - low) * unit(word)) as f32;
    if f64::from(value) >= high && low < high { value.next_down() } else { value }
}

/// Box-Muller: two words make two Gaussian values.
fn normal(words: [u32; 4], lane: usize) -> f64 {
    let (a, b) = (words[lane & 2], words[lane | 1]);
    // On (0, 1], of which the logarithm is finite.
    let radius = (-2.0 * (unit(a) + 2f64.powi(-32)).ln()).sqrt();
    let angle = TAU * unit(b);
    if lane & 1 == 0 { radius * angle.cos() } else { radius * angle.sin() }
}

/// Weights in files, matched with the parameters of a plan.
#[derive(Debug)]
pub struct Weights {
    files: Vec<Mapped>,
    tensors: BTreeMap<Buffer, Stored>,
}

/// A tensor in a file.
#[derive(Debug, Clone)]
struct Stored {
    file: usize,
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Where its elements start, and how many bytes they are.
    bytes: (usize, usize),
}

impl Weights {
    /// Opens `.safetensors` files that together have every parameter of `plan`, by its name or one of
    /// its aliases, in its shape, and nothing else.
    pub fn open(plan: &Plan, paths: &[PathBuf]) -> Result<Arc<Weights>, RunError> {
        let files: Vec<Mapped> =
            paths.iter().map(|it| Mapped::open(it)).collect::<Result<_, _>>()?;
        let mut stored: BTreeMap<String, Stored> = BTreeMap::new();
        for (i, file) in files.iter().enumerate() {
            for tensor in list(file, i)? {
                stored.insert(tensor.name.clone(), tensor);
            }
        }
        let mut res = Weights { files, tensors: BTreeMap::new() };
        let mut missing = Vec::new();
        for param in &plan.params {
            let name = &plan.buffers[param.buffer].name;
            let names = std::iter::once(name).chain(&param.aliases);
            let found: Vec<Stored> = names.filter_map(|it| stored.remove(it)).collect();
            let Some(first) = found.first() else {
                missing.push(name.clone());
                continue;
            };
            if let Some(other) = found.iter().find(|it| !res.same(first, it)) {
                let (first, second) = (first.name.clone(), other.name.clone());
                return Err(RunError::WeightsDiffer { first, second });
            }
            res.tensors.insert(param.buffer, first.clone());
        }
        if !missing.is_empty() || !stored.is_empty() {
            let unexpected = stored.into_keys().collect();
            return Err(RunError::WeightNames { files: paths.to_vec(), missing, unexpected });
        }
        res.check(plan)?;
        Ok(Arc::new(res))
    }

    /// Whether the files have this parameter.
    pub fn has(&self, param: Buffer) -> bool {
        self.tensors.contains_key(&param)
    }

    /// Elements `start ..` of a parameter, converted to f32.
    ///
    /// # Panics
    /// If the parameter is not one of the plan that the files were opened for.
    pub fn values(&self, param: Buffer, start: u64, out: &mut [f32]) {
        let tensor = &self.tensors[&param];
        let size = tensor.dtype.bitsize() / 8;
        let from = start as usize * size;
        let bytes = &self.data(tensor)[from..from + out.len() * size];
        match tensor.dtype {
            Dtype::F32 => convert(bytes, out, f32::from_le_bytes),
            Dtype::BF16 => convert(bytes, out, |it| bf16::from_le_bytes(it).to_f32()),
            Dtype::F16 => convert(bytes, out, |it| f16::from_le_bytes(it).to_f32()),
            Dtype::F64 => convert(bytes, out, |it| f64::from_le_bytes(it) as f32),
            _ => unreachable!("other types are refused when the file is opened"),
        }
    }

    fn data(&self, it: &Stored) -> &[u8] {
        &self.files[it.file].bytes()[it.bytes.0..it.bytes.0 + it.bytes.1]
    }

    fn same(&self, a: &Stored, b: &Stored) -> bool {
        a.dtype == b.dtype && a.shape == b.shape && self.data(a) == self.data(b)
    }

    /// Shapes and element types.
    fn check(&self, plan: &Plan) -> Result<(), RunError> {
        let mut tensors = Vec::new();
        for (&buffer, stored) in &self.tensors {
            let shape = &plan.buffers[buffer].ty.shape;
            if !stored.shape.iter().map(|&it| it as u64).eq(shape.iter().copied()) {
                let Stored { name, shape: found, .. } = stored;
                tensors.push(format!("`{name}` is {found:?} and must be {shape:?}"));
            }
            if !matches!(stored.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16 | Dtype::F64) {
                return Err(RunError::WeightDType {
                    name: stored.name.clone(),
                    path: self.files[stored.file].path.clone(),
                    dtype: format!("{:?}", stored.dtype),
                });
            }
        }
        if tensors.is_empty() { Ok(()) } else { Err(RunError::WeightShapes { tensors }) }
    }
}

/// The tensors of a file.
fn list(file: &Mapped, index: usize) -> Result<Vec<Stored>, RunError> {
    let tensors = parse(file)?;
    let base = file.bytes().as_ptr() as usize;
    let stored = tensors.iter().map(|(name, view)| Stored {
        file: index,
        name: name.to_string(),
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        bytes: (view.data().as_ptr() as usize - base, view.data().len()),
    });
    Ok(stored.collect())
}

/// Reads the header of a safetensors file.
pub(crate) fn parse(file: &Mapped) -> Result<SafeTensors<'_>, RunError> {
    let bad = |why: String| RunError::BadFile {
        path: file.path.clone(),
        expected: "a safetensors file",
        why,
    };
    let res = SafeTensors::deserialize(file.bytes()).map_err(|it| bad(it.to_string()))?;
    match checkpoint::repeated_name(file.bytes()) {
        Some(name) => Err(bad(format!("two tensors in its header are called `{name}`"))),
        None => Ok(res),
    }
}

fn convert<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks.iter().zip(out).for_each(|(&it, out)| *out = value(it));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(init: Init, seed: u64, name: &str, n: usize) -> Vec<f32> {
        let mut res = vec![0.0; n];
        init_values(init, seed, name, 0, &mut res);
        res
    }

    const NORMAL: Init = Init::Normal { mean: 1.0, std: 0.5 };

    #[test]
    fn values_depend_on_seed_and_name() {
        let base = values(NORMAL, 1, "w", 64);
        assert_eq!(base, values(NORMAL, 1, "w", 64));
        assert_ne!(base, values(NORMAL, 2, "w", 64));
        assert_ne!(base, values(NORMAL, 1 << 32, "w", 64));
        assert_ne!(base, values(NORMAL, 1, "v", 64));
    }

    #[test]
    fn a_part_has_the_values_of_the_whole() {
        for init in [NORMAL, Init::Uniform { low: -1.0, high: 2.0 }] {
            let whole = values(init, 7, "w", 41);
            for start in 0..40 {
                let mut part = vec![0.0; (41 - start).min(6)];
                init_values(init, 7, "w", start as u64, &mut part);
                assert_eq!(part, whole[start..start + part.len()]);
            }
        }
    }

    /// Of 100 000 values, mean and deviation are within five standard errors.
    #[test]
    fn moments_are_those_asked_for() {
        let n = 100_000;
        let moments = |values: &[f32]| {
            let mean = values.iter().map(|&it| f64::from(it)).sum::<f64>() / n as f64;
            let squares = values.iter().map(|&it| (f64::from(it) - mean).powi(2)).sum::<f64>();
            (mean, (squares / n as f64).sqrt())
        };
        let error = 5.0 / (n as f64).sqrt();
        let (mean, std) = moments(&values(NORMAL, 3, "w", n));
        assert!((mean - 1.0).abs() < 0.5 * error && (std - 0.5).abs() < 0.5 * error);
        let uniform = values(Init::Uniform { low: -1.0, high: 3.0 }, 3, "w", n);
        let (mean, std) = moments(&uniform);
        let expect = 4.0 / 12f64.sqrt();
        assert!((mean - 1.0).abs() < expect * error && (std - expect).abs() < expect * error);
        assert!(uniform.iter().all(|it| (-1.0..3.0).contains(it)));
    }

    /// As f32, the largest words are 1.
    #[test]
    fn uniform_never_reaches_its_bound() {
        assert_eq!(unit(u32::MAX) as f32, 1.0);
        assert_eq!(uniform(0.0, 1.0, u32::MAX), 1.0f32.next_down());
        assert_eq!(uniform(-2.0, -1.0, u32::MAX), (-1.0f32).next_down());
        assert_eq!(uniform(0.0, 1.0, 0), 0.0);
        assert_eq!(uniform(3.0, 3.0, 7), 3.0);
    }
}
