//! Python values as the literals of Python, which `ast.literal_eval` reads.

use std::fmt::Write;

use crate::pickle::Value;

/// How deep lists may be in lists.
const DEPTH: usize = 64;

/// A value as text; `None` if Python has no literal for it.
pub fn print(value: &Value) -> Option<String> {
    let mut res = String::new();
    put(value, &mut res)?;
    Some(res)
}

fn put(value: &Value, out: &mut String) -> Option<()> {
    match value {
        Value::None => out.push_str("None"),
        Value::Bool(true) => out.push_str("True"),
        Value::Bool(false) => out.push_str("False"),
        Value::Int(it) => write!(out, "{it}").ok()?,
        // Python reads what is too large as infinity, and has no literal for what is no number.
        Value::Float(it) if it.is_infinite() => {
            out.push_str(if *it > 0.0 { "1e999" } else { "-1e999" });
        }
        Value::Float(it) if it.is_nan() => return None,
        Value::Float(it) => write!(out, "{it:?}").ok()?,
        Value::Str(it) => put_text(it, out),
        Value::Bytes(_) | Value::Call { .. } => return None,
        Value::Tuple(it) => {
            let end = if it.len() == 1 { ",)" } else { ")" };
            put_list("(", it, end, out)?;
        }
        Value::List(it) => put_list("[", it, "]", out)?,
        Value::Dict(it) => {
            out.push('{');
            for (i, (key, value)) in it.iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                put(key, out)?;
                out.push_str(": ");
                put(value, out)?;
            }
            out.push('}');
        }
    }
    Some(())
}

fn put_list(start: &str, items: &[Value], end: &str, out: &mut String) -> Option<()> {
    out.push_str(start);
    for (i, it) in items.iter().enumerate() {
        out.push_str(if i > 0 { ", " } else { "" });
        put(it, out)?;
    }
    out.push_str(end);
    Some(())
}

fn put_text(text: &str, out: &mut String) {
    out.push('"');
    for it in text.chars() {
        match it {
            '"' | '\\' => out.extend(['\\', it]),
            '\n' => out.push_str("\\n"),
            it if it.is_control() => {
                let _ = write!(out, "\\U{:08x}", u32::from(it));
            }
            it => out.push(it),
        }
    }
    out.push('"');
}

/// The value that a text is.
///
/// # Errors
/// What is wrong, with the byte at which it is.
pub fn parse(text: &str) -> Result<Value, String> {
    let mut reader = Reader { text, at: 0 };
    let value = reader.value(0)?;
    reader.space();
    if reader.at < text.len() { Err(reader.wrong("the end")) } else { Ok(value) }
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn wrong(&self, expected: &str) -> String {
        format!("byte {} of `{}` should be {expected}", self.at, self.text)
    }

    fn space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    fn take(&mut self, token: &str) -> bool {
        self.space();
        let found = self.rest().starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    fn value(&mut self, depth: usize) -> Result<Value, String> {
        if depth > DEPTH {
            return Err(self.wrong("less deep"));
        }
        for (word, value) in
            [("None", Value::None), ("True", Value::Bool(true)), ("False", Value::Bool(false))]
        {
            if self.take(word) {
                return Ok(value);
            }
        }
        if self.take("[") {
            return Ok(Value::List(self.list("]", depth)?.0));
        }
        if self.take("(") {
            let (mut items, comma) = self.list(")", depth)?;
            // In brackets alone, a value is itself.
            return Ok(match items.len() {
                1 if !comma => items.remove(0),
                _ => Value::Tuple(items),
            });
        }
        if self.take("{") {
            return self.dict(depth);
        }
        if self.take("\"") {
            return self.string();
        }
        self.number()
    }

    /// Values up to `end`, and whether a comma stands before it.
    fn list(&mut self, end: &str, depth: usize) -> Result<(Vec<Value>, bool), String> {
        let mut res = Vec::new();
        loop {
            if self.take(end) {
                return Ok((res, true));
            }
            res.push(self.value(depth + 1)?);
            if !self.take(",") {
                return if self.take(end) { Ok((res, false)) } else { Err(self.wrong(end)) };
            }
        }
    }

    fn dict(&mut self, depth: usize) -> Result<Value, String> {
        let mut res = Vec::new();
        loop {
            if self.take("}") {
                return Ok(Value::Dict(res));
            }
            let key = self.value(depth + 1)?;
            if !self.take(":") {
                return Err(self.wrong(":"));
            }
            res.push((key, self.value(depth + 1)?));
            if !self.take(",") {
                return if self.take("}") { Ok(Value::Dict(res)) } else { Err(self.wrong("}")) };
            }
        }
    }

    fn string(&mut self) -> Result<Value, String> {
        let mut res = String::new();
        loop {
            let Some(it) = self.rest().chars().next() else { return Err(self.wrong("\"")) };
            self.at += it.len_utf8();
            match it {
                '"' => return Ok(Value::Str(res)),
                '\\' => res.push(self.escaped()?),
                it => res.push(it),
            }
        }
    }

    fn escaped(&mut self) -> Result<char, String> {
        let kind = self.rest().chars().next().unwrap_or(' ');
        let plain = match kind {
            '"' | '\\' => Some(kind),
            'n' => Some('\n'),
            _ => None,
        };
        if let Some(it) = plain {
            self.at += 1;
            return Ok(it);
        }
        let code = self.rest().get(1..9).filter(|_| kind == 'U');
        let code = code.and_then(|it| char::from_u32(u32::from_str_radix(it, 16).ok()?));
        let Some(code) = code else { return Err(self.wrong("an escape")) };
        self.at += 9;
        Ok(code)
    }

    fn number(&mut self) -> Result<Value, String> {
        self.space();
        let is_part = |it: char| it.is_ascii_alphanumeric() || matches!(it, '+' | '-' | '.');
        let text = self.rest();
        let text = &text[..text.find(|it| !is_part(it)).unwrap_or(text.len())];
        let float = || text.parse().ok().filter(|_| text.contains(|it: char| it.is_ascii_digit()));
        let value = text.parse().ok().map(Value::Int).or_else(|| float().map(Value::Float));
        let Some(value) = value else { return Err(self.wrong("a value")) };
        self.at += text.len();
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(value: Value, text: &str) {
        assert_eq!(print(&value).as_deref(), Some(text));
        assert_eq!(parse(text), Ok(value));
    }

    #[test]
    fn values_are_read_as_they_were_written() {
        check(Value::None, "None");
        check(Value::Bool(true), "True");
        check(Value::Int(-3), "-3");
        check(Value::Float(1e-8), "1e-8");
        check(Value::Float(1.0), "1.0");
        check(Value::Float(f64::NEG_INFINITY), "-1e999");
        check(Value::Tuple(vec![Value::Float(0.9), Value::Float(0.95)]), "(0.9, 0.95)");
        check(Value::Tuple(vec![Value::Int(1)]), "(1,)");
        check(Value::Tuple(vec![]), "()");
        let text = Value::Str("a\"b\\\n\u{7}\u{e9}".into());
        check(text.clone(), "\"a\\\"b\\\\\\n\\U00000007\u{e9}\"");
        let list = Value::List(vec![text, Value::List(vec![])]);
        check(list, "[\"a\\\"b\\\\\\n\\U00000007\u{e9}\", []]");
        let dict = vec![(Value::Int(0), Value::None), (Value::Str("k".into()), Value::Bool(false))];
        check(Value::Dict(dict), "{0: None, \"k\": False}");
    }

    #[test]
    fn what_is_no_literal_is_said() {
        let call = Value::Call { name: "torch.float32".into(), args: vec![] };
        assert_eq!(print(&Value::List(vec![call])), None);
        assert_eq!(print(&Value::Float(f64::NAN)), None);
        for text in ["", "[1", "(1 2)", "{1}", "nan", "inf", "1 2", "\"a", "\"\\x\"", "open()"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(parse(&"[".repeat(1000)).is_err());
        assert_eq!(parse("(7)"), Ok(Value::Int(7)));
    }
}
