//! Python's pickle format, as far as checkpoints need it. Reading runs nothing.
//!
//! A pickle is a program for a stack machine, and its `GLOBAL` and `REDUCE` call any function of Python.
//! Here they name an entry of a closed list, which stands for a plain value; every other name is an
//! error that says which ([`read`]). Memory and time are linear in the bytes read: what is shared by
//! reference stays shared, until [`Value`] copies it within a budget.

pub mod read;
pub mod write;

/// A Python value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An `int`, of 128 bits at most.
    Int(i128),
    /// A `float`.
    Float(f64),
    /// A `str`.
    Str(String),
    /// `bytes`.
    Bytes(Vec<u8>),
    /// A `tuple`; also `torch.Size`.
    Tuple(Vec<Value>),
    /// A `list`.
    List(Vec<Value>),
    /// A `dict`, in its order; also `OrderedDict`.
    Dict(Vec<(Value, Value)>),
    /// Something of a library that has no value of its own here, as in `torch.float32`, `set([1, 2])`.
    Call {
        /// `torch.float32`, `builtins.set`.
        name: String,
        /// Its arguments; none for what is only named.
        args: Vec<Value>,
    },
}

impl Value {
    /// The text of a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(it) => Some(it),
            _ => None,
        }
    }

    /// The value of an integer.
    pub fn as_int(&self) -> Option<i128> {
        match self {
            Value::Int(it) => Some(*it),
            _ => None,
        }
    }

    /// The value of a number.
    pub fn as_float(&self) -> Option<f64> {
        match self {
            Value::Int(it) => Some(*it as f64),
            Value::Float(it) => Some(*it),
            _ => None,
        }
    }

    /// The elements of a list or tuple.
    pub fn as_list(&self) -> Option<&[Value]> {
        match self {
            Value::List(it) | Value::Tuple(it) => Some(it),
            _ => None,
        }
    }
}

/// As Python prints it, as in `{'betas': (0.9, 0.95), 'fused': None}`.
impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let list = |f: &mut std::fmt::Formatter<'_>, items: &[Value]| {
            for (i, it) in items.iter().enumerate() {
                let comma = if i > 0 { ", " } else { "" };
                write!(f, "{comma}{it}")?;
            }
            Ok(())
        };
        match self {
            Value::None => f.write_str("None"),
            Value::Bool(true) => f.write_str("True"),
            Value::Bool(false) => f.write_str("False"),
            Value::Int(it) => write!(f, "{it}"),
            Value::Float(it) => f.write_str(&float(*it)),
            Value::Str(it) => f.write_str(&quoted(it)),
            Value::Bytes(it) => {
                write!(f, "b'{}'", it.escape_ascii())
            }
            Value::Tuple(it) => {
                f.write_str("(")?;
                list(f, it)?;
                f.write_str(if it.len() == 1 { ",)" } else { ")" })
            }
            Value::List(it) => {
                f.write_str("[")?;
                list(f, it)?;
                f.write_str("]")
            }
            Value::Dict(it) => {
                f.write_str("{")?;
                for (i, (key, value)) in it.iter().enumerate() {
                    let comma = if i > 0 { ", " } else { "" };
                    write!(f, "{comma}{key}: {value}")?;
                }
                f.write_str("}")
            }
            Value::Call { name, args } if args.is_empty() => f.write_str(name),
            Value::Call { name, args } => {
                write!(f, "{name}(")?;
                list(f, args)?;
                f.write_str(")")
            }
        }
    }
}

/// A `float` as Python prints it: `0.25`, `1e-08`, `inf`.
fn float(it: f64) -> String {
    if !it.is_finite() {
        return it.to_string().to_lowercase();
    }
    let text = format!("{it:e}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    match exponent.parse::<i32>() {
        Ok(-4..16) | Err(_) => format!("{it:?}"),
        Ok(e) => format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.abs()),
    }
}

/// A `str` as Python prints it: `'text'`, or `"it's"`.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut res = String::from(quote);
    for it in text.chars() {
        match it {
            '\n' => res.push_str("\\n"),
            '\r' => res.push_str("\\r"),
            '\t' => res.push_str("\\t"),
            it if it == '\\' || it == quote => res.extend(['\\', it]),
            it if it.is_control() => res.push_str(&format!("\\x{:02x}", u32::from(it))),
            it => res.push(it),
        }
    }
    res.push(quote);
    res
}
