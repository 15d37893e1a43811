//! Host lists and the like, as launchers write them.

/// The first host of a Slurm list: `gpu07` of `gpu[07-09,12],login`, `a1b2` of `a[1-2]b[2,4]`.
pub(super) fn first(list: &str) -> Option<String> {
    let (mut host, mut rest) = (String::new(), list);
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        if !rest[end..].starts_with('[') {
            break;
        }
        let (ranges, after) = rest[end + 1..].split_once(']')?;
        let one = ranges.split([',', '-']).next()?;
        if one.is_empty() || !one.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        host.push_str(one);
        rest = after;
    }
    let is_name = !host.is_empty() && !host.contains([']', ' ']);
    is_name.then_some(host)
}

/// How many tasks run on the node of this index: 3 on node 2 of `4(x2),3`.
pub(super) fn tasks_on(list: &str, node: usize) -> Option<usize> {
    let mut before = 0;
    for entry in list.split(',') {
        let (tasks, nodes) = match entry.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1_usize),
        };
        before += nodes;
        if node < before {
            return tasks.parse().ok();
        }
    }
    None
}

/// The first host of `1234.0;tcp://10.0.0.1,192.168.1.2:43211` or `1234.0;tcp6://[::1]:43211`.
pub(super) fn of_uri(uri: &str) -> Option<String> {
    let (_, hosts) = uri.split_once("://")?;
    let host = match hosts.strip_prefix('[') {
        Some(v6) => v6.split([']', ',']).next()?,
        None => hosts.split([',', ':']).next()?,
    };
    (!host.is_empty()).then(|| host.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_list() {
        for (list, host) in [
            ("node", "node"),
            ("node-a,node-b", "node-a"),
            ("gpu[07-09,12],login", "gpu07"),
            ("gpu[3]", "gpu3"),
            ("a[1-2]b[20,4],c", "a1b20"),
            ("rack1-n[001-128].cluster", "rack1-n001.cluster"),
        ] {
            assert_eq!(first(list).as_deref(), Some(host), "{list}");
        }
        for list in ["", ",a", "a[", "a[]", "a[x-y]", "a]b"] {
            assert_eq!(first(list), None, "{list}");
        }
    }

    #[test]
    fn the_tasks_of_a_node() {
        let tasks = |node| tasks_on("4(x2),3,1(x3)", node);
        let all: Vec<Option<usize>> = (0..7).map(tasks).collect();
        let counts = [4, 4, 3, 1, 1, 1].map(Some);
        assert_eq!(all, [&counts[..], &[None]].concat());
        assert_eq!(tasks_on("4(x", 0), None);
        assert_eq!(tasks_on("many", 0), None);
    }

    #[test]
    fn the_host_of_mpirun() {
        for (uri, host) in [
            ("1234.0;tcp://10.0.0.1,192.168.1.2:43211", "10.0.0.1"),
            ("1234.0;tcp://10.0.0.1:43211", "10.0.0.1"),
            ("1234.0;tcp6://[fe80::1]:43211", "fe80::1"),
        ] {
            assert_eq!(of_uri(uri).as_deref(), Some(host), "{uri}");
        }
        assert_eq!(of_uri("1234.0"), None);
    }
}
